"""What can be asked of a profile, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.memory.profile.request import (
    Backend,
    Kind,
    ProfileRequest,
    Workload,
    check_request,
    figure_4_1,
    make_workloads,
)
from coserve.core.errors import InvalidRequest


def request(**changes: object) -> ProfileRequest:
    whole = ProfileRequest(model="bundled", workloads=make_workloads(), batches=(1, 2), lengths=(8,))
    return msgspec.structs.replace(whole, **changes)


def test_every_rank_on_every_set_of_targets() -> None:
    found = make_workloads((8, 32), (None, ("q_proj", "v_proj")))
    assert found[0] == Workload(kind=Kind.INFERENCE)
    assert found[-1] == Workload(kind=Kind.FULL)
    assert [(one.rank, one.targets) for one in found[1:-1]] == [
        (8, None),
        (32, None),
        (8, ("q_proj", "v_proj")),
        (32, ("q_proj", "v_proj")),
    ]
    assert found[-2].name == "LoRA rank 32, q_proj,v_proj"
    assert Kind.FULL not in {one.kind for one in make_workloads(full=False)}


@pytest.mark.parametrize("rank", [0, -1, 1025])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(InvalidRequest, match=f"ranks from 1 to 1024, got {rank}"):
        make_workloads((8, rank))


def test_no_targets_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="targets"):
        make_workloads((8,), ((),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": ()}, "batches: expected at least one number, got none"),
        ({"batches": (0, 4)}, "batches: expected numbers from 1 up, got 0"),
        ({"lengths": (-3,)}, "lengths: expected numbers from 1 up, got -3"),
        ({"dtype": "int8"}, "dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        ({"recompute": True, "backends": (Backend.PEFT,)}, "recompute: the backend peft does not have it"),
    ],
)
def test_what_is_no_size_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_request(request(**changes))
    assert str(error.value) == message


def test_the_papers_figure() -> None:
    """Section 4.2.3: GPT-2 XL, 11 tokens, batches of 3 to 1000, rank 32 on c_attn and c_proj."""
    found = figure_4_1()
    check_request(found)
    assert found.config is not None
    assert [found.config[name] for name in ("n_embd", "n_layer", "n_head")] == [1600, 48, 25]
    assert found.lengths == (11,)
    assert (found.batches[0], found.batches[-1]) == (3, 1000)
    assert list(found.batches) == sorted(found.batches)
    assert found.workloads[1] == Workload(kind=Kind.LORA, rank=32, targets=("c_attn", "c_proj"))
    assert [one.kind for one in found.workloads] == list(Kind)
