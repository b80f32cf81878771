import pytest
import torch

from medusa_train.decode.cache import DecodeCache
from medusa_train.errors import ModelError

LAYERS, HEADS, SIZE = 2, 3, 4


def states(tokens, *, layer=0, rows=1):
    """Keys that tell their token and layer, and values that are their negatives."""
    keys = torch.tensor(tokens, dtype=torch.float32) + 1000 * layer
    keys = keys[None, None, :, None].expand(rows, HEADS, len(tokens), SIZE)
    return keys, -keys


def feed(cache, tokens, *, rows=1):
    """Write tokens into every layer; what the last layer sees."""
    for layer in range(LAYERS):
        seen = cache.update(*states(tokens, layer=layer, rows=rows), layer)
    return seen


def certain(cache, layer):
    """Tokens that stay, as the layer's keys tell them."""
    keys, values = cache.update(*states([], layer=layer), layer)
    assert torch.equal(keys, -values)
    return (keys[0, 0, :, 0] - 1000 * layer).tolist()


def test_lengths_after_partial_acceptance():
    """The last token of the answer is not read yet: the cache holds one less than the text."""
    cache = DecodeCache(LAYERS, 40)
    feed(cache, list(range(8)))
    cache.commit(range(8))
    lengths = [cache.length + 1]
    for drafts, accepted in [(5, 2), (5, 0), (5, 5), (3, 1)]:
        feed(cache, list(range(100, 101 + drafts)))
        cache.commit(range(accepted + 1))
        lengths.append(cache.length + 1)
    assert lengths == [9, 12, 13, 19, 21]
    assert cache.get_seq_length() == 20
    assert cache.get_mask_sizes(3) == (23, 0)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ([0], [1, 2, 10]),
        ([0, 1, 2], [1, 2, 10, 11, 12]),
        ([0, 2, 5], [1, 2, 10, 12, 15]),
        ([], [1, 2]),
    ],
)
def test_kept_tokens_move_together_in_every_layer(keep, left):
    cache = DecodeCache(LAYERS, 20)
    feed(cache, [1, 2])
    cache.commit([0, 1])
    keys, values = feed(cache, [10, 11, 12, 13, 14, 15])
    assert (keys[0, 0, :, 0] - 1000).tolist() == [1, 2, 10, 11, 12, 13, 14, 15]
    assert torch.equal(keys, -values)
    cache.commit(keep)
    assert certain(cache, 0) == certain(cache, 1) == left


def test_rejected_tokens_are_written_over():
    cache = DecodeCache(LAYERS, 20)
    feed(cache, [1, 2, 3, 4])
    cache.commit([0, 3])
    feed(cache, [7])
    cache.commit([0])
    assert certain(cache, 0) == certain(cache, 1) == [1, 4, 7]


def test_rewind():
    cache = DecodeCache(LAYERS, 20)
    feed(cache, [1, 2, 3, 4])
    cache.commit(range(4))
    cache.rewind(4)
    assert certain(cache, 1) == [1, 2, 3, 4]
    cache.rewind(9)  # there is no more than four
    assert certain(cache, 1) == [1, 2, 3, 4]
    cache.rewind(3)
    assert certain(cache, 1) == [1, 2, 3]
    cache.rewind(-2)
    assert cache.length == 0
    feed(cache, [8])
    cache.commit([0])
    assert certain(cache, 0) == certain(cache, 1) == [8]


def test_storage_keeps_its_address():
    cache = DecodeCache(LAYERS, 20)
    address = feed(cache, [1, 2, 3])[0].data_ptr()
    cache.commit([0, 2])
    for tokens in ([5], [6, 7, 8]):
        assert feed(cache, tokens)[0].data_ptr() == address
        cache.commit([0])
    cache.rewind(1)
    assert feed(cache, [9])[0].data_ptr() == address


def test_an_overflow_is_an_error():
    cache = DecodeCache(LAYERS, 4)
    feed(cache, [1, 2, 3])
    cache.commit(range(3))
    feed(cache, [4])
    with pytest.raises(ModelError, match="5 tokens do not fit a cache for 4"):
        feed(cache, [4, 5])


def test_unequal_layers_are_refused():
    cache = DecodeCache(LAYERS, 4)
    keys, values = states([1])
    cache.update(keys, values, 0)
    with pytest.raises(ModelError, match="layer 1 has 1 key-value heads, layer 0 has 3"):
        cache.update(keys[:, :1], values[:, :1], 1)


def test_rows_that_leave():
    cache = DecodeCache(LAYERS, 4)
    keys, values = states([1, 2], rows=3)
    keys = keys + torch.tensor([0.0, 10.0, 20.0])[:, None, None, None]
    for layer in range(LAYERS):
        cache.update(keys, values, layer)
    cache.commit(range(2))
    cache.keep_rows(torch.tensor([0, 2]))
    left, _ = cache.update(*states([5], rows=2), 1)
    assert left[:, 0, :, 0].tolist() == [[1, 2, 5], [21, 22, 5]]


def test_one_row_becomes_many():
    cache = DecodeCache(LAYERS, 4)
    feed(cache, [1, 2])
    cache.commit(range(2))
    cache.repeat_rows(3)
    keys, values = feed(cache, [7], rows=3)
    assert (keys[:, 0, :, 0] - 1000).tolist() == [[1, 2, 7]] * 3
    assert torch.equal(keys, -values)
