"""How `generate` of a streamed model uses the plain model on the device."""
