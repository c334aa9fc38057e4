"""Regions of remote clients: local memory and its tokens, POSIX objects where the server shares the memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from clientlib.remote import transport
from shm.errors import Code, InferError
from tests.fakes.remote import FakeTransport, answer, client_on, plan_of


@pytest.fixture
def client():
    with client_on(FakeTransport()) as client:
        yield client


@pytest.fixture
def sharing():
    return FakeTransport(shares_memory=True)


@pytest.fixture
def near(sharing):
    with client_on(sharing) as client:
        yield client


class TestShared:
    def objects(self):
        return [path.name for path in Path("/dev/shm").glob(f"tensorbroker.{os.getpid()}.*")]

    def test_regions_are_registered_and_named(self, near, sharing):
        sharing.answers = lambda request: answer(None, (1, 4))
        region, plan = plan_of(near, slots=(1, 4))
        (word,) = [word for word in sharing.said if isinstance(word, transport.RegisterSystem)]
        assert (word.name, word.byte_size, word.key.strip("/")) == ("r", 4096, self.objects()[0])
        region.array((4, 4), np.float32, 1024)[3] = 7  # as if the server had written
        result = plan.infer(output_slot=3)
        assert result["y"].tolist() == [[7] * 4]
        assert result.copied_bytes == 0
        (request,) = sharing.requests
        assert [(each.region, each.offset, each.byte_size, each.data) for each in request.inputs] == [
            ("r", 0, 16, None)
        ]
        assert [(each.region, each.offset, each.byte_size) for each in request.outputs] == [("r", 1024 + 48, 16)]
        near.unregister("r")
        assert sharing.said[-1] == transport.Unregister("r")
        assert self.objects() == []

    def test_one_that_the_server_refuses_leaves_nothing(self, near, sharing):
        sharing.refuses[transport.RegisterSystem] = InferError(Code.UNAVAILABLE, "quota")
        with pytest.raises(InferError, match="quota"):
            near.create_region("r", 4096)
        assert self.objects() == []
        assert near.regions() == []

    def test_objects_go_with_their_client(self, sharing):
        client = client_on(sharing)
        region = client.create_region("r", 4096)
        view = region.array((4,), np.float32)
        assert len(self.objects()) == 1
        client.close()
        assert self.objects() == []
        view[:] = 1

    def test_those_of_a_killed_client_go_when_the_next_one_makes_some(self, near, sharing):
        code = """
            import sys
            from tests.fakes.remote import FakeTransport, client_on
            client = client_on(FakeTransport(shares_memory=True))
            client.create_region("r", 4096)
            print("made", flush=True)
            sys.stdin.read()
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout.readline() == b"made\n"
            (theirs,) = Path("/dev/shm").glob(f"tensorbroker.{other.pid}.*")
            near.create_region("a", 4096)
            assert theirs.exists()
            other.kill()
            other.wait()
        near.create_region("b", 4096)
        assert not theirs.exists()
        assert len(self.objects()) == 2

    def test_memory_is_in_use_until_the_server_is_done(self, near, sharing):
        sharing.answers = None
        _, plan = plan_of(near)
        pending = plan.submit(timeout=0.01)
        with pytest.raises(InferError, match="Request timeout expired"):
            pending.result()
        assert sharing.cancels == 1
        assert not pending.done()
        with pytest.raises(InferError, match="has not ended"):
            plan.submit()
        sharing.end(answer(None, (1, 4)))
        assert pending.done()
        sharing.answers = lambda request: answer(None, (1, 4))
        assert plan.infer(timeout=30)["y"].shape == (1, 4)

    def test_large_arrays_go_through_regions_that_are_used_again(self, near, sharing):
        sharing.answers = lambda request: answer(bytes(4), (1, 1))
        for _ in range(3):
            result = near.infer("double", {"x": np.ones((1, 100_000), np.float32)})
            assert result.copied_bytes == 400_004
        assert len(self.objects()) == 1
        (tensor,) = sharing.requests[-1].inputs
        assert (tensor.data, tensor.offset, tensor.byte_size) == (None, 0, 400_000)
        assert near.regions() == []
        for power in range(21, 27):
            near.infer("double", {"x": np.ones((1, 1 << power - 2), np.float32)})
        assert len(self.objects()) <= 5
        near.infer("double", {"x": np.ones((1, 4), np.float32)})
        assert sharing.requests[-1].inputs[0].region == ""
        near.close()
        assert self.objects() == []

    def test_a_region_that_cannot_be_made_for_them(self, near, sharing):
        sharing.refuses[transport.RegisterSystem] = InferError(Code.UNAVAILABLE, "quota")
        with pytest.raises(InferError, match="quota"):
            near.infer("double", {"x": np.ones((1, 100_000), np.float32)})
        assert self.objects() == []

    def test_a_token_is_registered_again(self, near, sharing):
        region = near.create_region("r", 4096)
        other = near.open_region(near.share(region), "again")
        region.array((4,), np.uint8)[:] = 9
        assert other.array((4,), np.uint8).tolist() == [9] * 4
        with pytest.raises(InferError, match="overlap"):
            near.prepare("double", {"x": region.tensor((1, 4), "FP32")}, {"y": other.tensor((1, 4), "FP32")})


class TestTokens:
    @pytest.mark.parametrize("token", ["", "x", "local.1.2.3", "local.1.2.3.4", "local.0.99999.3.64", "local.1.0.x.64"])
    def test_that_name_nothing(self, client, token):
        with pytest.raises(InferError) as caught:
            client.open_region(token)
        assert caught.value.code == ("NOT_FOUND" if token else "INVALID_ARG")

    def test_a_descriptor_that_is_another_file_now(self, client, tmp_path):
        region = client.create_region("r", 4096)
        token = region.share()
        fd = region.memory.fd
        client.unregister("r")
        (tmp_path / "f").write_bytes(b"x" * 4096)
        other = os.open(tmp_path / "f", os.O_RDWR)
        os.dup2(other, fd)
        try:
            with pytest.raises(InferError, match="Unable to find shared memory region"):
                client.open_region(token)
        finally:
            os.close(fd)
            if other != fd:
                os.close(other)

    def test_a_size_that_is_not_the_regions(self, client):
        token = client.create_region("r", 4096).share()
        with pytest.raises(InferError):
            client.open_region(f"{token}0")
