"""Ensembles against their members' configurations: Triton's texts for what does not fit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from broker.repository.ensembles import (
    as_decoupled,
    cycle,
    is_decoupled,
    labels,
    members,
    unavailable_members,
    unfit_members,
    workers_of,
)
from broker.repository.scheduling import Ensemble, Step


def tensor(name: str, *dims: int, datatype: str = "FP32", **more) -> TensorConfig:
    return TensorConfig(name=name, datatype=datatype, dims=dims, **more)


def model(name: str, inputs, outputs, batch: int = 8, **more) -> ModelConfig:
    fields = {
        "name": name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "directory": "/models",
        "versions": {1: "/models/1"},
        "default_model_filename": "model.onnx",
        "max_batch_size": batch,
        "input": inputs,
        "output": outputs,
        "instance_group": (InstanceGroup(name=name),),
    }
    return ModelConfig(**(fields | more))


def ensemble(*steps: Step, inputs=None, outputs=None, batch: int = 8, **more) -> ModelConfig:
    return model(
        "E",
        inputs or (tensor("IN", 16),),
        outputs or (tensor("OUT", 16),),
        batch,
        ensemble=Ensemble(step=steps),
        **(more | {"platform": "ensemble", "backend": "ensemble"}),
    )


def step(name: str, source: str, target: str, **more) -> Step:
    return Step(model_name=name, input_map={"X": source}, output_map={"Y": target}, **more)


def identity(name: str, *dims: int, batch: int = 8, datatype: str = "FP32", **more) -> ModelConfig:
    x, y = tensor("X", *dims, datatype=datatype), tensor("Y", *dims, datatype=datatype)
    return model(name, (x,), (y,), batch, **more)


CHAIN = (step("a", "IN", "mid"), step("b", "mid", "OUT"))


def refusal(config: ModelConfig, *configs: ModelConfig) -> str:
    return next(unfit_members(config, {member.name: member for member in configs})).text


def accept(config: ModelConfig, *configs: ModelConfig) -> None:
    assert list(unfit_members(config, {member.name: member for member in configs})) == []


def test_members_are_named_once_in_order():
    assert members(Ensemble(step=(step("b", "IN", "x"), step("a", "x", "y"), step("b", "y", "z")))) == ("b", "a")


# --- are they there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loaded", "failures", "text"),
    [
        ({"a": (1,)}, {}, "ensemble 'E' depends on 'b' which has no loaded version."),
        (
            {"a": (1,), "b": ()},
            {"b": "no file"},
            "ensemble 'E' depends on 'b' which has no loaded version. Model 'b' loading failed with error: no file",
        ),
        ({"a": (1,), "b": (1,)}, {}, "ensemble 'E' depends on 'b' whose required version 2 is not loaded."),
    ],
)
def test_a_member_that_does_not_serve(loaded, failures, text):
    config = ensemble(step("a", "IN", "mid"), step("b", "mid", "OUT", model_version=2))
    assert next(unavailable_members(config, loaded, failures)).text == text
    assert list(unavailable_members(config, {"a": (1,), "b": (1, 2)}, {})) == []


def test_an_ensemble_of_itself_is_a_circle():
    def of(*names: str) -> Ensemble:
        return Ensemble(step=tuple(step(name, "IN", "OUT") for name in names))

    assert cycle("A", {"A": of("B"), "B": of("x", "A")}) == "circular dependency between ensembles: A -> ... -> B -> A"
    assert cycle("A", {"A": of("A")}) == "circular dependency between ensembles: A -> ... -> A -> A"
    assert cycle("A", {"A": of("B", "C"), "B": of("D"), "C": of("D"), "D": of("x")}) == ""


# --- do they fit --------------------------------------------------------------------------------------------------


def test_a_chain_that_fits():
    accept(ensemble(*CHAIN), identity("a", 16), identity("b", 16))
    accept(ensemble(*CHAIN), identity("a", -1), identity("b", 16))


def test_batching_and_other_models_mix_when_whole_shapes_fit():
    accept(ensemble(*CHAIN), identity("a", 16), identity("b", -1, 16, batch=0))
    assert refusal(ensemble(*CHAIN), identity("a", 16), identity("b", 4, 3, batch=0)) == (
        "in ensemble E, ensemble tensor mid: inconsistent shape: [-1,16] is inferred from model a while [4,3] is "
        "inferred from model b"
    )


def test_a_smaller_batch_of_a_member():
    assert refusal(ensemble(*CHAIN), identity("a", 16), identity("b", 16, batch=4)) == (
        "ensemble E allows maximum batch size 8, but it contains model b which only allows maximum batch size to be 4"
    )


def test_other_datatypes():
    assert refusal(ensemble(*CHAIN), identity("a", 16, datatype="BYTES"), identity("b", 16)) == (
        "in ensemble E, ensemble tensor IN: inconsistent data type: TYPE_FP32 is inferred from model E while "
        "TYPE_STRING is inferred from model a"
    )


def test_maps_to_what_the_member_does_not_have():
    bad_input = Step(model_name="a", input_map={"Q": "IN"}, output_map={"Y": "OUT"})
    assert refusal(ensemble(bad_input), identity("a", 16)) == (
        "in ensemble E, ensemble tensor IN is mapping to non-existing input Q in model a"
    )
    bad_output = Step(model_name="a", input_map={"X": "IN"}, output_map={"Q": "OUT"})
    assert refusal(ensemble(bad_output), identity("a", 16)) == (
        "in ensemble E, ensemble tensor OUT is mapped from non-existing output Q in model a"
    )


def test_an_input_without_a_tensor_must_be_optional():
    def two(optional: bool) -> ModelConfig:
        return model("a", (tensor("X", 16), tensor("Z", 16, optional=optional)), (tensor("Y", 16),))

    one = step("a", "IN", "OUT")
    accept(ensemble(one), two(True))
    assert refusal(ensemble(one), two(False)) == (
        "in ensemble E, input Z in model a is not mapped to any ensemble tensors"
    )


def test_an_ensemble_is_where_most_of_its_members_are_else_where_the_first_is():
    def group(*groups: str) -> str:
        names = [f"m{at}" for at in range(len(groups))]
        steps = [step(name, "IN", f"t{at}") for at, name in enumerate(names)]
        configs = [identity(n, 16, parameters={"worker_group": g}) for n, g in zip(names, groups, strict=True)]
        (key,) = workers_of(ensemble(*steps), {config.name: config for config in configs})
        return key.removeprefix("cpu/")

    assert [group("a"), group("a", "b"), group("b", "a"), group("a", "b", "b"), group("a", "b", "a")] == list("aabba")


def test_members_may_be_in_other_workers_decoupled_or_not():
    one = step("a", "IN", "OUT")
    two = step("b", "IN", "more")
    here, there = identity("a", 16), identity("b", 16, parameters={"worker_group": "other"})
    for decoupled in (False, True):
        accept(ensemble(one, two), here, replace(there, decoupled=decoupled))


SUM = Step(model_name="sum", input_map={"A": "left", "B": "right"}, output_map={"Y": "OUT"})


def test_answers_of_decoupled_members_cannot_be_cached():
    kept = ensemble(step("a", "IN", "OUT"), response_cache=True)
    accept(kept, identity("a", 16))
    assert refusal(kept, identity("a", 16, decoupled=True)) == (
        "Response Cache does not currently support model E with 'decoupled' transaction policy. Please disable the "
        "response cache."
    )


def test_responses_of_decoupled_members_side_by_side_belong_to_nobody():
    a, b = identity("a", 16, decoupled=True), identity("b", 16, decoupled=True)
    total = model("sum", (tensor("A", 16), tensor("B", 16)), (tensor("Y", 16),))
    side_by_side = ensemble(step("a", "IN", "left"), step("b", "IN", "right"), SUM)
    different = "receives inputs originated from different decoupled models"
    assert refusal(side_by_side, a, b, total).startswith(f"in ensemble E, step of model 'sum' {different}: of 'left', ")
    outputs = (tensor("left", 16), tensor("right", 16))
    both = ensemble(step("a", "IN", "left"), step("b", "IN", "right"), outputs=outputs)
    assert refusal(both, a, b).startswith(f"in ensemble E, step of model 'E' {different}: of 'left', 'right', ")


@pytest.mark.parametrize("second", [identity("b", 16), identity("b", 16, decoupled=True)])
def test_responses_may_be_read_beside_what_they_follow_from(second):
    a = identity("a", 16, decoupled=True)
    total = model("sum", (tensor("A", 16), tensor("B", 16)), (tensor("Y", 16),))
    one_after_the_other = ensemble(step("a", "IN", "left"), step("b", "left", "right"), SUM)
    configs = {member.name: member for member in (a, second, total)}
    assert list(unfit_members(one_after_the_other, configs)) == []
    assert is_decoupled(one_after_the_other, configs)
    assert not is_decoupled(ensemble(*CHAIN), {"a": identity("a", 16), "b": identity("b", 16)})


def test_an_ensemble_is_decoupled_if_a_member_is_whatever_it_says():
    """As in Triton, which overwrites what the ensemble's own configuration says."""
    plain, many = identity("a", 16), identity("a", 16, decoupled=True)
    inner, outer = ensemble(step("a", "IN", "OUT"), decoupled=True, json="{}"), ensemble(step("E", "IN", "OUT"))
    for member, stated in ((plain, True), (plain, False), (many, True), (many, False)):
        one = as_decoupled(replace(inner, decoupled=stated), {"a": member})
        assert one.decoupled == member.decoupled
        assert bool(one.notes) == (stated and not member.decoupled)
        assert (one.json == "{}") == (one.decoupled == stated)
        around = replace(outer, name="around", json="{}")
        assert as_decoupled(around, {"a": member, "E": replace(inner, decoupled=stated)}).decoupled == member.decoupled


def test_class_names_are_the_members_unless_there_are_own():
    last = model("b", (tensor("X", 16),), (tensor("Y", 16, labels=b"cat\ndog"),))
    configs = {"a": identity("a", 16), "b": last}
    assert labels(ensemble(*CHAIN), configs) == {"OUT": b"cat\ndog"}
    assert labels(ensemble(*CHAIN, outputs=(tensor("OUT", 16, labels=b"own"),)), configs) == {"OUT": b"own"}
    assert labels(ensemble(*CHAIN), configs | {"b": identity("b", 16)}) == {"OUT": b""}
