"""A rollout engine on the CPU, which serves a real model at the vLLM HTTP endpoints that TRL's client uses.

TRL's ``VLLMClient`` and ``VLLMGeneration`` run unchanged, except for the transfer of weights. NCCL needs GPUs, so the
weights go through a socket, in the order announced to ``/update_weights``. Like vLLM's packed NCCL sender, the sender
collects several tensors before it sends them.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

import torch
from torch import Tensor

PACKED = 5  # number of tensors that are collected before they are sent


class RolloutServer:
    """Server for a model. ``received`` lists the tensor names of each update, and ``calls`` the path of each request.

    Args:
        model: Plain model, whose weights the updates replace.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.received, self.calls = model.eval(), list[list[str]](), list[str]()
        self.trainer_side, self._engine_side = socket.socketpair()
        self._served = _server_of(self)
        self.url = f"http://127.0.0.1:{self._served.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[RolloutServer]:
        """Serve requests within the context, and make TRL assume that vLLM is installed."""
        from trl.generation import vllm_client, vllm_generation

        thread = threading.Thread(target=self._served.serve_forever, daemon=True)
        thread.start()

        def init_communicator(client: Any, device: Any = 0) -> None:
            assert client.get_server_info()["weight_transfer_config"] is not None
            client.communicator = self.trainer_side

        try:
            with (
                mock.patch.object(vllm_client, "is_vllm_available", return_value=True),
                mock.patch.object(vllm_generation, "is_vllm_available", return_value=True),
                mock.patch.object(vllm_client.VLLMClient, "init_communicator", init_communicator),
                mock.patch.object(vllm_client, "NCCLTrainerSendWeightsArgs", dict, create=True),
                mock.patch.object(vllm_client, "NCCLWeightTransferEngine", _Sender, create=True),
            ):
                yield self
        finally:
            self._served.shutdown()
            self._served.server_close()
            thread.join()
            self.trainer_side.close()
            self._engine_side.close()

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request, as a JSON object."""
        self.calls.append(path)
        if path == "/v1/models":
            return {"data": [{"id": "policy"}]}
        if path == "/server_info":
            told = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {"max_model_len": 256}}
            told["model_config"]["logprobs_mode"] = "processed_logprobs"  # type: ignore[assignment]
            return {"vllm_config": told}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/update_weights":
            self._update(request["update_info"])
        if path == "/v1/completions":
            return {"choices": list(self._choices(request))}
        return {}

    def _update(self, told: dict[str, Any]) -> None:
        own = dict(self.model.named_parameters())
        assert set(told["names"]) == set(own), "a tied weight once, none left out"
        for name, dtype, shape in zip(told["names"], told["dtype_names"], told["shapes"], strict=True):
            parameter = own[name]
            assert (str(parameter.dtype), list(parameter.shape)) == (f"torch.{dtype}", shape), name
            numbers = bytearray(parameter.numel() * parameter.element_size())
            view = memoryview(numbers)
            while view:
                view = view[self._engine_side.recv_into(view) :]
            with torch.no_grad():
                parameter.copy_(torch.frombuffer(numbers, dtype=parameter.dtype).view(parameter.shape))
        self.received.append(told["names"])

    @torch.no_grad()
    def _choices(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield each prompt's greedy answer, then ``n`` - 1 answers that begin with the next most likely tokens."""
        for prompt in request["prompt"]:
            for number in range(request["n"]):
                ids, logprobs = list(prompt), list[float]()
                while len(logprobs) < request["max_tokens"]:
                    scores = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
                    token = int(scores.argsort(descending=True)[0 if logprobs else number])
                    ids.append(token)
                    logprobs.append(float(scores[token]))
                tokens = ids[len(prompt) :]
                names = [f"token_id:{token}" for token in tokens]
                told = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": [None] * len(tokens)}
                yield {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": told}


class _Sender:
    """Stand-in for vLLM's NCCL engine on the trainer's side."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: dict[str, Any]) -> None:
        packed: list[Tensor] = []
        for _, tensor in iterator:
            packed.append(tensor)
            if len(packed) == PACKED:
                _send(trainer_args["group"], packed)
        _send(trainer_args["group"], packed)


def _send(to: socket.socket, packed: list[Tensor]) -> None:
    for tensor in packed:
        to.sendall(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    packed.clear()


def _server_of(owner: RolloutServer) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(owner.answer(self.path.partition("?")[0], {}))

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self._reply(owner.answer(self.path, json.loads(self.rfile.read(length) or b"{}")))

        def _reply(self, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)
