"""`generate` of a streamed model, with the plain model on the device."""
