import pytest
import torch

from flowrl.prefix import HostPrefix, Prefix, PrefixStore, Rows


def make(batch: int, tokens: int, seed: int = 0) -> Prefix:
    generator = torch.Generator().manual_seed(seed)
    return Prefix(
        {
            "pad_mask": torch.ones(batch, tokens, dtype=torch.bool),
            "keys": torch.randn(batch, 2, tokens, 3, generator=generator).to(torch.bfloat16),
        },
        {"pad_mask": 1, "keys": 2},
    )


def test_indexing_keeps_the_batch_dimension_and_the_dtype():
    prefix = make(4, 5)
    for index, rows in ((2, [2]), (slice(1, 3), [1, 2]), ([3, 0], [3, 0]), (torch.tensor([1, 1]), [1, 1])):
        part = prefix[index]
        assert len(part) == len(rows)
        assert part.tensors["keys"].dtype == torch.bfloat16
        assert torch.equal(part.tensors["keys"], torch.stack([prefix.tensors["keys"][row] for row in rows]))


def test_rows_are_one_choice_for_both_kinds_of_prefix():
    prefix, rows = make(5, 4), Rows.of([4, 0, 3, 1], torch.device("cpu"))
    on_host = HostPrefix(prefix.tensors, prefix.token_axes)
    assert same(prefix[rows], prefix[[4, 0, 3, 1]]) and same(on_host[rows], prefix[rows])
    parts = rows.split(3)
    assert (
        [part.index.tolist() for part in parts] == [part.host.tolist() for part in parts] == [[4, 0, 3], [1]]
    )
    assert [len(part) for part in parts] == [3, 1] and len(rows) == 4


def test_concatenation_undoes_indexing():
    prefix = make(5, 4)
    again = Prefix.concatenate([prefix[0], prefix[1:4], prefix[[4]]])
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in prefix.tensors.items())


def test_rows_go_to_the_places_that_are_given():
    prefix = make(5, 4)
    places = [torch.tensor([3, 0]), torch.tensor([1]), torch.tensor([4, 2])]
    parts = [prefix[rows] for rows in places]
    assert same(Prefix.concatenate(parts, places), prefix)
    store = PrefixStore("cpu", torch.device("cuda"))
    for part in parts:
        store.add(part)
    on_host = store.join(places)
    assert isinstance(on_host, HostPrefix) and same(on_host[torch.arange(5)], prefix)


def test_batches_of_different_length_are_padded_with_masked_tokens():
    short, long = make(1, 3, seed=1), make(2, 5, seed=2)
    joined = Prefix.concatenate([short, long])
    assert joined.tensors["pad_mask"].sum(1).tolist() == [3, 5, 5]
    assert torch.equal(joined.tensors["keys"][:1, :, :3], short.tensors["keys"])
    assert joined.tensors["keys"][:1, :, 3:].abs().max() == 0
    assert torch.equal(joined.tensors["keys"][1:], long.tensors["keys"])


def test_repeat_interleave_repeats_rows_in_place():
    prefix = make(2, 3)
    repeated = prefix.repeat_interleave(3)
    assert len(repeated) == 6
    for row in range(6):
        assert torch.equal(repeated.tensors["keys"][row], prefix.tensors["keys"][row // 3])


def test_num_bytes_counts_every_tensor():
    assert make(2, 3).num_bytes == 2 * 3 + 2 * 2 * 3 * 3 * 2


def test_tensors_of_different_batch_sizes_are_refused():
    with pytest.raises(ValueError, match="one batch size"):
        Prefix({"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)})
    with pytest.raises(ValueError, match="empty"):
        Prefix.concatenate([])
    with pytest.raises(ValueError, match="differ"):
        Prefix.concatenate([Prefix({"a": torch.zeros(1)}), Prefix({"b": torch.zeros(1)})])


def same(a: Prefix, b: Prefix) -> bool:
    return all(
        torch.equal(a.tensors[name], b.tensors[name]) and a.tensors[name].dtype == b.tensors[name].dtype
        for name in b.tensors
    )


@pytest.mark.parametrize("index", [2, slice(1, 3), [3, 0], torch.tensor([1, 1])])
def test_rows_of_a_prefix_in_host_memory_are_those_of_the_prefix(index):
    prefix = make(4, 5)
    rows = HostPrefix(prefix.tensors, prefix.token_axes)[index]
    assert type(rows) is Prefix and same(rows, prefix[index])


def stored(offload: str, device: str, free: list[int], whole: int = 800) -> tuple[PrefixStore, Prefix]:
    """Three rounds, with the free memory after each."""
    left = list(free)
    store = PrefixStore(offload, torch.device(device), lambda _: (left.pop(0), whole))
    for seed in range(3):
        store.add(make(2, 3, seed))
    return store, store.join()


ROUND = make(2, 3).num_bytes


@pytest.mark.parametrize(
    ("offload", "device", "free", "on_host"),
    [
        ("cpu", "cuda", [], True),
        ("gpu", "cuda", [], False),
        ("cpu", "cpu", [], False),
        ("auto", "cpu", [], False),
        ("auto", "cuda", [900, 800, 3 * ROUND], False),
        ("auto", "cuda", [900, 800, 3 * ROUND - 1], True),  # no room for the joined copy
        ("auto", "cuda", [900, 199], True),  # a quarter is the update's
    ],
)
def test_prefixes_wait_where_they_fit(offload, device, free, on_host):
    assert 3 * ROUND > 200 > 2 * ROUND  # 200 is the quarter of 800
    _, prefix = stored(offload, device, free)
    assert isinstance(prefix, HostPrefix) == on_host
    whole = Prefix.concatenate([make(2, 3, seed) for seed in range(3)])
    assert same(prefix[torch.arange(6)], whole)


def test_each_rollout_is_judged_anew_and_joining_frees_the_pieces():
    store, first = stored("auto", "cuda", [100, 900, 900, 900])
    assert isinstance(first, HostPrefix)
    piece = make(2, 3)
    store.add(piece)
    assert type(store.join()) is Prefix and piece.tensors == {}
