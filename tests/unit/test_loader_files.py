"""Model files that are damaged, hostile or point elsewhere: always a reason, never an exception."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from broker.repository.config import LoadFailure, ModelConfig
from tests.fakes import models
from tests.fakes.loading import config_of, reason_of, run

ADD1 = models.add1().SerializeToString()
LABELLED = 'output { name: "y" data_type: TYPE_FP32 dims: -1 label_filename: "labels" }'


# --- the file itself ----------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    """A model whose only node holds a graph whose only node holds a graph, `depth` times."""

    def field(number: int, length: int) -> bytes:
        encoded = bytearray([number << 3 | 2])
        while length > 127:
            encoded.append(length & 127 | 128)
            length >>= 7
        return bytes(encoded) + bytes([length])

    prefixes: list[bytes] = []
    length = 0
    for _ in range(depth):
        for number in (6, 5, 1):  # AttributeProto.g, NodeProto.attribute, GraphProto.node
            prefixes.append(field(number, length))
            length += len(prefixes[-1])
    return b"\x08\x08" + field(7, length) + b"".join(reversed(prefixes))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "is empty (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer, not a model"),
        (ADD1[: len(ADD1) // 2], "is not an ONNX model, or is truncated"),
        (b"\x00" * 100, "is not an ONNX model"),
        (b"\x08\x08", "is not an ONNX model: it has no graph"),
        (nested(10_000), "is not an ONNX model"),
    ],
    ids=["empty", "lfs", "half", "zeros", "no graph", "nested"],
)
def test_damaged_files(tmp_path, data, part):
    reason = reason_of(tmp_path, data)
    assert reason.startswith(f"{tmp_path}/m/1/model.onnx: ")
    assert part in reason


def outcome(root: Path, data: bytes) -> ModelConfig | LoadFailure:
    models.write_model(root, "m", data)
    return run(root)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(cut=st.integers(0, len(ADD1)), position=st.integers(0, len(ADD1) - 1), value=st.integers(0, 255))
def test_a_file_cut_or_changed_anywhere_loads_or_is_refused(tmp_path, cut, position, value):
    assert isinstance(outcome(tmp_path, ADD1[:cut]), ModelConfig if cut == len(ADD1) else LoadFailure)
    changed = bytearray(ADD1)
    changed[position] = value
    assert isinstance(outcome(tmp_path, bytes(changed)), ModelConfig | LoadFailure)


def test_files_that_are_no_files(tmp_path):
    models.write_model(tmp_path, "m")
    (tmp_path / "m" / "1" / "model.onnx").mkdir()
    assert run(tmp_path).reason == f"{tmp_path}/m/1/model.onnx: is not a regular file"
    (tmp_path / "m" / "config.pbtxt").mkdir()
    assert run(tmp_path).reason == f"{tmp_path}/m/config.pbtxt: is not a regular file"


def test_a_pipe_does_not_block(tmp_path):
    models.write_model(tmp_path, "m")
    os.mkfifo(tmp_path / "m" / "1" / "model.onnx")
    assert "is not a regular file" in run(tmp_path).reason


def test_a_huge_configuration_is_not_read(tmp_path):
    models.write_model(tmp_path, "m", models.add1())
    with open(tmp_path / "m" / "config.pbtxt", "wb") as file:
        file.truncate(100 << 20)
    assert "has 104857600 bytes, the limit is 1 MiB" in run(tmp_path).reason


def test_a_huge_model_is_not_read(tmp_path):
    models.write_model(tmp_path, "m", models.add1())
    os.truncate(tmp_path / "m" / "1" / "model.onnx", 1 << 40)
    assert "the limit is 2 GiB: keep the weights in external data files" in run(tmp_path).reason


def test_links_of_files(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "model.onnx").write_bytes(ADD1)
    models.write_model(root, "m")
    path = root / "m" / "1" / "model.onnx"
    path.symlink_to(outside / "model.onnx")
    assert isinstance(run(root), ModelConfig)
    path.unlink()
    path.symlink_to("nowhere")
    assert run(root).reason == f"{path} is a link to nowhere, which does not exist"
    path.unlink()
    path.symlink_to("/dev/null")
    assert "is not a regular file" in run(root).reason
    path.parent.rename(outside / "1")
    (root / "m" / "1").symlink_to("absent")
    reason = f"failed to load 'm', no version is available: {root}/m/1 is a link to absent, which does not exist"
    assert run(root).reason == reason
    (root / "m" / "config.pbtxt").symlink_to(root / "m" / "config.pbtxt")
    assert run(root).reason.endswith("config.pbtxt, which leads back to itself")


def test_a_model_whose_parts_are_all_links(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    store = models.write_model(outside, "m", models.add1(), config=LABELLED)
    (store / "labels").write_text("cat\n")
    (root / "m").mkdir(parents=True)
    for name in ("1", "labels", "config.pbtxt"):
        (root / "m" / name).symlink_to(store / name)
    (root / "whole").symlink_to(store)
    for name in ("m", "whole"):
        found = run(root, name)
        assert isinstance(found, ModelConfig), found.reason
        assert found.versions == {1: str(root / name / "1")}
        assert found.output[0].labels == b"cat\n"


def test_what_came_with_a_load_names_no_file_behind_a_link(tmp_path):
    """Clients choose these names; what lies behind links is for the operator to choose."""
    (tmp_path / "secret").write_bytes(ADD1)
    directory = models.write_model(tmp_path, "m", models.add1())
    (directory / "1" / "other.onnx").symlink_to(tmp_path / "secret")
    (directory / "labels").symlink_to(tmp_path / "secret")
    (directory / "1" / "model.onnx").rename(tmp_path / "stored")
    (directory / "1" / "model.onnx").symlink_to(tmp_path / "stored")
    labelled = '{"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1], "label_filename": "labels"}]}'
    for config, part in (
        ('{"default_model_filename": "other.onnx"}', "must stay within the version directory"),
        (labelled, "label_filename 'labels', which is no file in"),
    ):
        assert part in run(tmp_path, overrides={"m": config}).reason
    for config in ('{"max_batch_size": 2}', '{"default_model_filename": "model.onnx"}'):
        assert isinstance(run(tmp_path, overrides={"m": config}), ModelConfig)


@pytest.mark.parametrize("name", ["Config.pbtxt", "config.pbtxt.txt", "config.prototxt", "config.json", "configpbtxt"])
def test_a_configuration_of_another_name_is_not_read_and_that_is_said(tmp_path, name):
    directory = models.write_model(tmp_path, "m", models.add1())
    (directory / name).write_text("max_batch_size: 3")
    text = f"{directory}/{name} is not read: a configuration is called config.pbtxt"
    assert text in run(tmp_path).notes
    (directory / "1" / "model.onnx").unlink()
    assert run(tmp_path).reason.endswith(f"\n    {text}")
    (directory / "config.pbtxt").write_text('backend: "onnxruntime"')
    assert "is not read" not in run(tmp_path).reason


# --- tensors that no request can carry ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (
            helper.make_value_info("x", helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [1]))),
            "input 'x' is an ONNX sequence value; only tensors can be served",
        ),
        (
            helper.make_value_info("x", helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [1]))),
            "input 'x' is an ONNX optional value",
        ),
        (
            helper.make_value_info("x", helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [1]))),
            "input 'x' is an ONNX map value",
        ),
        (onnx.ValueInfoProto(name="x"), "input 'x' is an ONNX untyped value"),
        (models.tensor("x", [1], TensorProto.COMPLEX64), "has ONNX data type COMPLEX64, which no request can carry"),
        (models.tensor("x", [1], 99), "has ONNX data type 99"),
    ],
    ids=["sequence", "optional", "map", "untyped", "complex", "unknown"],
)
def test_values_that_are_no_tensors(tmp_path, value, part):
    model = models.build([helper.make_node("Identity", ["x"], ["y"])], [value], [models.tensor("y", [1])])
    assert part in reason_of(tmp_path, model)


def test_a_large_weight_does_not_disturb_inference(tmp_path):
    model = models.build(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [models.tensor("x", ["batch", 256])],
        [models.tensor("y", None)],
        {"w": np.zeros((256, 256), np.float32)},
    )
    assert config_of(tmp_path, model).output[0].dims == (256,)


# --- external data ------------------------------------------------------------------------------------------------


def with_external(
    location: str, offset: int | str = 0, length: int | str = 4, *, where: str = "graph"
) -> onnx.ModelProto:
    """x + w, with w's four bytes in another file; `where`: the tensor is in the graph, a Constant or a function."""
    model = models.add1()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    if where != "graph":
        constant = helper.make_node("Constant", [], ["one"], value=tensor)
        del model.graph.initializer[:]
        if where == "constant":
            model.graph.node.insert(0, constant)
        else:
            opset = [helper.make_opsetid("", 17)]
            model.functions.append(helper.make_function("local", "One", [], ["one"], [constant], opset))
            model.graph.node.insert(0, helper.make_node("One", [], ["one"], domain="local"))
    return model


@pytest.fixture
def version(tmp_path):
    """The version directory, with `w.bin`, `sub/w.bin`, and things around it that a model must not reach."""
    directory = tmp_path / "m" / "1"
    (directory / "sub").mkdir(parents=True)
    for path in (directory / "w.bin", directory / "sub" / "w.bin", tmp_path / "m" / "outer.bin"):
        path.write_bytes(struct.pack("<f", 1.0))
    (directory / "link.bin").symlink_to("w.bin")
    (directory / "linked").symlink_to(directory / "sub")
    os.link(tmp_path / "m" / "outer.bin", directory / "hard.bin")
    os.mkfifo(directory / "pipe")
    return directory


@pytest.mark.parametrize("where", ["graph", "constant", "function"])
@pytest.mark.parametrize(
    ("location", "part"),
    [
        ("", "must be a relative path inside the directory of the model file"),
        ("../outer.bin", "must be a relative path"),
        ("sub/../../outer.bin", "must be a relative path"),
        ("/etc/hostname", "must be a relative path"),
        ("..\\outer.bin", "must be a relative path"),
        ("w.bin\0", "must be a relative path"),
        ("missing.bin", "cannot be found: No such file or directory"),
        ("link.bin", "must not be reached through a symbolic link"),
        ("linked/w.bin", "must not be reached through a symbolic link"),
        ("hard.bin", "must not be a hard link"),
        ("pipe", "is not a regular file"),
        ("sub", "is not a regular file"),
        ("w.bin/x", "cannot be found: Not a directory"),
        ("*/_ORT_MEM_ADDR_/*", "cannot be found"),
    ],
)
def test_external_data_that_leads_elsewhere(tmp_path, version, location, part, where):
    reason = reason_of(tmp_path, with_external(location, where=where))
    assert reason.startswith("external data of tensor 'one' (")
    assert part in reason


@pytest.mark.parametrize("location", ["w.bin", "sub/w.bin", "./w.bin"])
def test_external_data_beside_the_model(tmp_path, version, location):
    assert config_of(tmp_path, with_external(location)).max_batch_size == 4
    version.rename(tmp_path / "stored")  # "beside" is seen from where the link leads
    version.symlink_to("../stored")
    assert isinstance(run(tmp_path), ModelConfig)


def test_external_data_beside_a_model_file_that_is_a_link_must_be_where_the_link_is(tmp_path, version):
    """The runtime looks there first, and refuses what lies only beside the file itself."""
    config_of(tmp_path, with_external("w.bin"))
    (tmp_path / "stored").mkdir()
    for name in ("model.onnx", "w.bin"):
        (version / name).rename(tmp_path / "stored" / name)
    (version / "model.onnx").symlink_to(tmp_path / "stored" / "model.onnx")
    assert "cannot be found" in run(tmp_path).reason
    (version / "w.bin").symlink_to(tmp_path / "stored" / "w.bin")
    assert "fix: copy the file, or make the version directory the link" in run(tmp_path).reason


@pytest.mark.parametrize(
    ("offset", "length", "part"),
    [
        (1, 4, "needs bytes 1 to 5, the file has 4: is it truncated?"),
        (2**63, 4, "is it truncated?"),
        (-4, 4, "is it truncated?"),
        (0, -1, "is it truncated?"),
        ("x", 4, "has an offset or length that is not a number"),
    ],
)
def test_external_data_beyond_its_file(tmp_path, version, offset, length, part):
    assert part in reason_of(tmp_path, with_external("w.bin", offset, length))


def test_sparse_weights_are_looked_at_too(tmp_path, version):
    model = models.add1()
    values = with_external("../outer.bin").graph.initializer[0]
    indices = helper.make_tensor("indices", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    assert "must be a relative path" in reason_of(tmp_path, model)
