"""Whether NVLink connects a group's GPUs, decided by what each of its ranks says."""

import pytest
import torch.distributed as dist

from fp4compile.distributed import link

BOTH = [("host", "a", frozenset("b")), ("host", "b", frozenset("a"))]


def among(monkeypatch, seen, backends="cpu:gloo,cuda:nccl"):
    """The verdict of the first of some ranks. seen: each rank's host, GPU, and GPUs that NVLink connects it to."""

    def gather(found, mine, group):
        assert (mine, group) == (seen[0], "group")
        found[:] = seen

    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(seen))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(link, "_neighbours", lambda: seen[0])
    return link.nvlink_connects("group")


def test_two_gpus_of_one_host(monkeypatch):
    assert among(monkeypatch, BOTH)


@pytest.mark.parametrize("seen", [
    [("host", "a", frozenset("b")), ("other host", "b", frozenset("a"))],
    [("host", "a", frozenset("b")), ("host", "b", frozenset())],
    [("host", "a", frozenset("b")), ("host", "b", frozenset("a")), ("host", "c", frozenset("a"))],
    [("host", "a", frozenset("a")), ("host", "a", frozenset("a"))],
    [("host", "a", frozenset())],
], ids=["two hosts", "one rank cannot tell", "a third GPU apart", "one GPU of two ranks", "one rank"])  # fmt: skip
def test_anything_else_is_no_nvlink(seen, monkeypatch):
    assert not among(monkeypatch, seen)


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:gloo", "cpu:fake,cuda:fake"])
def test_collectives_without_nccl_do_not_use_it(backends, monkeypatch):
    assert not among(monkeypatch, BOTH, backends)
