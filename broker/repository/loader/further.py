"""What else is wrong with a model that cannot be configured: all at once for `tensorbroker check`, not one per run.

Called by the process's main loop when `LoadRequest.every` asks for it, after `load` has said the first. Only what does
not follow from another error is told: each rule is tried by itself, and what needs the result of a step that failed is
left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import final

from tritonclient.grpc import model_config_pb2

from broker.repository.config import LoadFailure
from broker.repository.loader.backend import ENSEMBLE
from broker.repository.loader.complete import comparisons, complete, made_inputs
from broker.repository.loader.convert_scheduling import warm_up
from broker.repository.loader.failure import ModelError
from broker.repository.loader.files import read_file
from broker.repository.loader.load import (
    ReadVersion,
    check_directory_name,
    config_path,
    find_backend,
    located_in,
    read_version,
    served_versions,
)
from broker.repository.loader.normalise import normalise
from broker.repository.loader.own_code import check_code
from broker.repository.loader.parameters import check_parameters
from broker.repository.loader.pbtxt import MAX_CONFIG, Parsed
from broker.repository.loader.repair import parse_all
from broker.repository.loader.validate import MAX_BATCH, setting_rules, tensor_rules
from broker.repository.loader.validate_ensemble import check_mapped_once, validate_ensemble
from broker.repository.protocol import LoadRequest
from broker.repository.scan import ModelDirectory

MOST = 16  # reasons beside the first
_MOST_PIECES = 32  # of one kind that are tried: each is tried in a configuration of its own


def further(model: ModelDirectory, request: LoadRequest, failure: LoadFailure) -> tuple[str, ...]:
    """The reasons beside that of `failure`, in the order in which they would have come one after the other.

    None for a configuration that did not come from a file.
    """
    if model.name in request.overrides:
        return ()
    search = _Search(model, request)
    with contextlib.suppress(Exception):  # what `load` has answered already is more than nothing
        search.run()
    found = dict.fromkeys(located_in(error, model, request) for error in search.errors[: MOST + 1])
    return tuple(reason for reason in found if reason != failure.reason)[:MOST]


@final
class _Search:
    """The steps of `load`, each of which may fail."""

    __slots__ = ("_model", "_request", "errors")

    def __init__(self, model: ModelDirectory, request: LoadRequest) -> None:
        self._model = model
        self._request = request
        self.errors: list[ModelError] = []

    def run(self) -> None:
        """Fills `errors`."""
        path = config_path(self._model, self._request.config_name)
        data = read_file(path, MAX_CONFIG, "1 MiB")
        parsed, self.errors = parse_all(data, path)
        if parsed is None:
            return  # what was meant is not known, so anything else may follow from that
        config = parsed.config
        config.name = config.name or self._model.name
        versions, none_served = served_versions(config, self._model, [])
        newest_first = list(reversed(versions.items()))
        if not self._tried(partial(find_backend, config, self._model, versions, none_served)):
            return
        self._tried(partial(check_code, self._model))
        self._each(_parameters(config))
        written = frozenset(text.name for text in config.input)
        version = None
        if none_served:
            self.errors.append(ModelError(none_served, "version_policy"))
        elif config.backend == "onnxruntime":
            version = self._version(config, parsed, *newest_first[0])
        text = data.decode("utf-8-sig", "replace")
        if config.platform == ENSEMBLE and self._tried(partial(check_mapped_once, config, text)):
            self._tried(partial(validate_ensemble, config))
        self._tried(partial(check_directory_name, config, self._model))
        normalise(config, self._request.gpus, on_cpu=config.backend in self._request.on_cpu)
        if version is None and not (config.input and config.output):
            return  # nothing could complete it
        if self._rules(config, version) and (
            version is None or self._each(comparisons(config, version.signature, version.path, written))
        ):
            self._each(_warm_ups(config, self._model))

    def _version(
        self, config: model_config_pb2.ModelConfig, parsed: Parsed, number: int, directory: str
    ) -> ReadVersion | None:
        """What the model file has, once it has completed the configuration; None if it cannot."""
        found: list[ReadVersion] = []

        def read() -> None:
            version = read_version(config, self._model, number, directory)
            if not self._request.strict:
                states, size = parsed.states_max_batch_size, self._request.default_max_batch_size
                complete(config, version.signature, states, size)
            found.append(version)

        return found[0] if self._tried(read) else None

    def _rules(self, config: model_config_pb2.ModelConfig, version: ReadVersion | None) -> bool:
        """Are the tensors right, and what makes tensors for the model, so that they can be compared with others?"""
        tensors = () if version is None else (*version.signature.inputs, *version.signature.outputs)
        scalars = frozenset(tensor.name for tensor in tensors if tensor.shape == ())
        are_right = self._each(tensor_rules(config, self._model, scalars))
        if not 0 <= config.max_batch_size <= MAX_BATCH:
            return False
        settings = self._each(setting_rules(config, self._model, self._request.gpus, self._request.no_gpus))
        return are_right and (settings or not made_inputs(config))

    def _each(self, rules: Iterable[Callable[[], object]]) -> bool:
        return all([self._tried(rule) for rule in rules])

    def _tried(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except ModelError as error:
            self.errors.append(error)
            return False
        return True


def _parameters(config: model_config_pb2.ModelConfig) -> Iterator[Callable[[], object]]:
    """Each parameter by itself, beside all the rest of the configuration."""
    for name in sorted(config.parameters)[:_MOST_PIECES]:
        single = model_config_pb2.ModelConfig()
        single.CopyFrom(config)
        for other in config.parameters:
            if other != name:
                del single.parameters[other]
        yield partial(check_parameters, single)


def _warm_ups(config: model_config_pb2.ModelConfig, model: ModelDirectory) -> Iterator[Callable[[], object]]:
    """Each sample without inputs, and then each input of it in a sample of one row."""
    for index, sample in enumerate(config.model_warmup[:_MOST_PIECES]):
        for key in (None, *sorted(sample.inputs)[:_MOST_PIECES]):
            single = model_config_pb2.ModelConfig()
            single.CopyFrom(config)
            del single.model_warmup[:]
            piece = single.model_warmup.add()
            piece.CopyFrom(sample)
            piece.name = sample.name or f"warmup_{index}"
            piece.batch_size = sample.batch_size if key is None else 1
            for other in sample.inputs:
                if other != key:
                    del piece.inputs[other]
            yield partial(warm_up, single, model)
