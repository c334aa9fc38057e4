"""Control mode poll: what counts as changed, settled and gone, and what is looked at on disk."""

from __future__ import annotations

import os

from broker.polling import Changes, Manifest, Watch, manifests
from tests.fakes import models


def files(*sizes: int) -> Manifest:
    return tuple((f"{at}/model.onnx", 0, size, 0) for at, size in enumerate(sizes))


def test_what_is_as_it_was_at_start_is_left_alone():
    watch = Watch({"m": files(1)})
    assert watch.look({"m": files(1)}) == Changes((), (), False)


def test_what_is_still_being_copied_waits_until_two_looks_see_the_same():
    watch = Watch({"m": files(1)})
    assert watch.look({"m": files(1, 5)}) == Changes((), (), True)
    assert watch.look({"m": files(1, 9)}) == Changes((), (), True)
    assert watch.look({"m": files(1, 9), "new": files(1)}) == Changes(("m",), (), True)
    assert watch.look({"m": files(1, 9), "new": files(1)}) == Changes(("new",), (), False)
    assert watch.look({"m": files(1, 9), "new": files(1)}) == Changes((), (), False)


def test_a_change_that_is_taken_back_is_none():
    watch = Watch({"m": files(1)})
    watch.look({"m": files(2)})
    assert watch.look({"m": files(1)}) == Changes((), (), False)


def test_what_is_gone_for_one_look_is_being_replaced():
    watch = Watch({"m": files(1), "n": files(1)})
    assert watch.look({}) == Changes((), (), True)
    assert watch.look({"m": files(2)}) == Changes((), ("n",), True)
    assert watch.look({"m": files(2)}) == Changes(("m",), (), False)


def test_manifests_see_every_change_of_a_file_and_no_cache(tmp_path):
    directory = models.write_model(tmp_path, "m", b"data", config="max_batch_size: 1")
    seen = [manifests([str(tmp_path)])]
    (directory / "1" / "__pycache__").mkdir()
    (directory / "1" / "__pycache__" / "x.pyc").write_bytes(b"")
    assert manifests([str(tmp_path)]) == seen[0]
    os.utime(directory / "config.pbtxt", ns=(1, 1))
    seen.append(manifests([str(tmp_path)]))
    (directory / "2").mkdir()
    seen.append(manifests([str(tmp_path)]))
    (directory / "loop").symlink_to(directory)
    seen.append(manifests([str(tmp_path)]))
    (directory / "dangling").symlink_to("nowhere")
    seen.append(manifests([str(tmp_path)]))
    assert len({found["m"] for found in seen if found}) == len(seen)


def test_manifests_see_links_that_are_set_anew_and_what_changes_behind_them(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for name in ("a", "b"):
        models.write_model(tmp_path / name, "m", b"data")
    os.unlink(tmp_path / "b" / "m" / "1" / "model.onnx")
    os.link(tmp_path / "a" / "m" / "1" / "model.onnx", tmp_path / "b" / "m" / "1" / "model.onnx")
    seen = []
    for target in ("a", "b", "absent"):  # the files are the same
        (root / "m").symlink_to(tmp_path / target / "m")
        seen.append(manifests([str(root)]))
        (root / "m").unlink()
    (root / "m").symlink_to(tmp_path / "a" / "m")
    assert manifests([str(root)]) == seen[0]
    os.utime(tmp_path / "a" / "m" / "1" / "model.onnx", ns=(1, 1))
    seen.append(manifests([str(root)]))
    assert len({found["m"] for found in seen if found}) == 4


def test_a_repository_that_cannot_be_read_says_nothing_about_its_models(tmp_path):
    assert manifests([str(tmp_path / "absent")]) is None
