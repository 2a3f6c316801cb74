"""TRL's client of a vLLM server, that notices when the server is lost, waits for it, and sends it the weights again.

Needs trl and requests, which vLLM brings along."""
from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from megacompile.errors import MegacompileError, ServerError, UnsupportedError, shortened

#: Seconds without a sign of life after which a server is lost. A sign is an answer to a probe, or that it takes a weight.
LOST_S = 60.0
#: Seconds between two probes, and how long each waits for its answer.
PROBE_S = 5.0
#: Releases of vLLM that the tests have run with (the extra `vllm`).
VERSIONS = ("0.32",)

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class LastingClient(VLLMClient):
    """State: `sent`, the version of the weights that the server was sent last, empty if they did not arrive whole; and when it
    gave the last sign of life. `restore` sends all weights; whoever makes a client sets it."""

    restore: Callable[[], None]

    def __init__(self, *args: Any, connection_timeout: float = 0.0, **kwargs: Any) -> None:
        self._patience_s, self._heard, self.sent = connection_timeout, time.monotonic(), ""
        super().__init__(*args, connection_timeout=connection_timeout, **kwargs)
        # TRL's session repeats requests. A server that was started again would answer them with the weights of its beginning.
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter())
        self.session.headers["Connection"] = "close"  # the server may be closing one that was kept open, as after an error

    def renewed(self, ask: Callable[[], _Answer]) -> _Answer:
        """What `ask` returns. If the server is lost, waits for it as long as at the beginning (`vllm_server_timeout`), sends it
        the weights, and asks once more. Raises `ServerError` if it stays away, or is lost again."""
        try:
            return ask()
        except ServerError as error:
            _log.warning("%s; training waits for it, at most %.0f s", error.cause, self._patience_s)
            self._cut()
            self.check_server(self._patience_s)
            self.init_communicator(self._device)
            # A server that has hung may be in the update that was given up, and begins no other one. Else it refuses this.
            self._response(lambda: self.session.post(f"{self.base_url}/finish_weight_update", json={}))
            if ask is not self.restore:
                self.restore()
            return ask()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        def ask() -> Any:
            if self.sent != self._get(f"{self.base_url}/weight_info")["weight_version"]:
                raise self._lost("has other weights than it was sent")  # those that it started with, if it was started again
            return super(LastingClient, self).generate(*args, **kwargs)

        return self.renewed(ask)

    # ---------------------------------------------------------------- weights
    def init_communicator(self, device: Any = 0) -> None:
        self._device = device
        super().init_communicator(device)

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Tensor]]) -> None:
        if self.communicator is None:
            raise self._lost("has no connection for weights")
        self.sent = ""
        try:
            super().update_named_params(metadata, self._counted(named_params))
        except MegacompileError:
            raise
        except Exception as error:
            if self.communicator is not None:
                raise
            raise self._lost("takes no more weights") from error  # the request for them has failed, and cut the connection

    def _counted(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for each in weights:
            self._heard = time.monotonic()
            yield each

    def _finish_weight_update(self) -> None:
        version = uuid.uuid4().hex
        self._post(f"{self.base_url}/finish_weight_update", json={"weight_version": version})
        self.sent = version

    def _cut(self) -> None:
        """Ends the connection for weights, also while another thread waits in it."""
        self.sent, communicator = "", self.communicator
        if communicator is not None:
            communicator.destroy()
            self.close_communicator()

    # ---------------------------------------------------------------- requests
    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        deadline = time.monotonic() + total_timeout
        while not self._alive():
            if time.monotonic() >= deadline:
                raise self._lost(f"did not answer for {total_timeout:.0f} s")
            time.sleep(retry_interval)
        super().check_server()
        version = self._get(f"{self.base_url}/version")["version"]
        if not version.startswith(tuple(f"{each}." for each in VERSIONS)):
            raise UnsupportedError(f"vLLM {version} was not tested: serve with {' or '.join(VERSIONS)}, or leave use_vllm out")

    def _get(self, url: str, **kwargs: Any) -> Any:
        return self._answered(lambda: self.session.get(url, **kwargs))

    def _post(self, url: str, **kwargs: Any) -> Any:
        return self._answered(lambda: self.session.post(url, **kwargs))

    def _answered(self, request: Callable[[], requests.Response]) -> Any:
        """The answer to a request, from JSON. Raises `ServerError` if the server is lost."""
        response = self._response(request)
        if response.status_code >= 500:
            self._cut()
            raise self._lost(f"answered {response.status_code}, {shortened(response.text)}")
        if response.status_code != 200:
            raise MegacompileError(f"the vLLM server at {self.base_url} refused a request: {response.status_code}, "
                                   f"{shortened(response.text)}")
        return response.json()

    def _response(self, request: Callable[[], requests.Response]) -> requests.Response:
        """The response. A thread waits for it that may be left behind: a server that hangs leaves a connection open forever."""
        answer: Future[requests.Response] = Future()
        self._heard = time.monotonic()
        threading.Thread(target=_settle, args=(answer, request), daemon=True).start()
        while not wait([answer], timeout=PROBE_S).done:
            if self._alive():
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > LOST_S:
                self._cut()
                raise self._lost(f"gave no sign of life for {LOST_S:.0f} s")
        try:
            return answer.result()
        except requests.RequestException as error:
            self._cut()
            raise self._lost(f"ended a request ({type(error).__name__})") from error

    def _alive(self) -> bool:
        """True if the server's engine answers, which it does between two steps. While it takes weights it does not."""
        try:
            return requests.get(f"{self.base_url}/weight_info", timeout=PROBE_S).status_code < 500
        except requests.RequestException:
            return False

    def _lost(self, what: str) -> ServerError:
        return ServerError(f"the vLLM server at {self.base_url} {what}")


def _settle(answer: Future[requests.Response], request: Callable[[], requests.Response]) -> None:
    try:
        answer.set_result(request())
    except BaseException as error:  # whoever waits gets it
        answer.set_exception(error)
