import copy

import pytest
import torch
import transformers
from decoding_case import VOCAB, make_tree, random_ids
from seq2seq_case import make_seq2seq, make_t5, noisy

from medusa_train.decode import DraftModel, Plain, Sampling, generate, generate_batch
from medusa_train.decode.forward import Reader
from medusa_train.errors import DataError, ModelError
from medusa_train.model.seq2seq import Seq2SeqModel, load_seq2seq
from medusa_train.model.tiny import byte_tokenizer, tiny_llama

PROMPTS = [random_ids(length, seed=length) for length in (9, 3, 17)]
TREE = make_tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])


@pytest.fixture(scope="module")
def tiny_t5():
    return make_seq2seq()


def states_of(target, prompt, answer):
    """Decoder states behind the start token and an answer, without a cache, [1 + T, D]."""
    ids = torch.tensor([[target.start_id, *answer]])
    out = target.model(
        input_ids=torch.tensor([prompt]), decoder_input_ids=ids, output_hidden_states=True
    )
    return out.decoder_hidden_states[-1][0]


def path_to(tree, node):
    nodes = [node]
    while tree.parent[nodes[-1]] >= 0:
        nodes.append(tree.parent[nodes[-1]])
    return nodes[::-1]


def test_each_node_of_each_row_reads_as_if_its_path_were_all_there_is(tiny_t5):
    """In rows of unequal prompts and unequal answers."""
    reader = Reader(tiny_t5)
    before = [random_ids(length, seed=length) for length in (2, 7, 5)]
    nodes = random_ids(TREE.nodes + 1, seed=1)
    with torch.no_grad():
        reader.prefill(PROMPTS, capacity=30)
        chain = make_tree([(0,) * depth for depth in range(1, 7)], num_heads=6)
        filled = [[*ids, *[0] * (7 - len(ids))] for ids in before]
        reader.read(torch.tensor(filled), chain)
        reader.cache.commit([range(len(ids)) for ids in before])
        found = reader.read(torch.tensor([nodes] * 3), TREE)
        for row, (prompt, ids) in enumerate(zip(PROMPTS, before, strict=True)):
            for node in range(len(nodes)):
                path = [nodes[n] for n in path_to(TREE, node)]
                expected = states_of(tiny_t5, prompt, [*ids, *path])[-1]
                torch.testing.assert_close(found[row, node], expected, rtol=1e-4, atol=1e-4)


def test_bias_goes_by_distance(tiny_t5):
    distance = torch.tensor([[0.0, 3.0, 25.0], [-4.0, 1.0, 7.0]])
    attention = tiny_t5.model.decoder.block[0].layer[0].SelfAttention
    with torch.no_grad():
        found = tiny_t5.position_bias(distance)
        expected = attention.compute_bias(1, 26, past_seen_tokens=25)[0, :, 0]
    assert found.shape == (4, 2, 3)
    for row, column in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2)):
        place = 25 - int(distance[row, column])
        torch.testing.assert_close(found[:, row, column], expected[:, place])


def test_the_encoder_reads_each_prompt_as_by_itself(tiny_t5):
    with torch.no_grad():
        together = tiny_t5.source(PROMPTS)
        together.keep_rows([2, 1])
        for row, prompt in enumerate([PROMPTS[2], PROMPTS[1]]):
            alone = tiny_t5.source([prompt])
            torch.testing.assert_close(together.states[row, : len(prompt)], alone.states[0])
            seen = together.mask[row, 0, 0] == 0
            assert seen.tolist() == [place < len(prompt) for place in range(17)]


def test_the_model_itself_is_left_as_it_was():
    model = make_t5()
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        before = model(input_ids=ids, decoder_input_ids=ids).logits
        target = Seq2SeqModel(model, byte_tokenizer(), name="t")
        generate(Plain(target), PROMPTS[0], max_new_tokens=5, end_ids=())
        assert torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, before)
    assert not any(weight.requires_grad for weight in model.parameters())


def test_padding_ids_are_never_chosen():
    model = make_t5("t5-v1.1")
    model.lm_head.weight.data[VOCAB:] = 100 * torch.randn(5, 32)
    target = Seq2SeqModel(model, byte_tokenizer(), name="t")
    found = generate(Plain(target), PROMPTS[0], max_new_tokens=30, end_ids=())
    assert max(found.ids) < VOCAB
    assert target.vocab_size == VOCAB + 5


def test_an_empty_prompt_is_refused(tiny_t5):
    with pytest.raises(DataError, match="the prompt has no tokens"):
        generate_batch(Plain(tiny_t5), [[5], []], max_new_tokens=3, end_ids=())


def test_drawn_answers_depend_on_prompt_and_seed_alone(tiny_t5):
    sampling = Sampling(temperature=0.8, top_k=20, seed=3)
    draft = noisy(tiny_t5, 0.02)
    for method in (Plain(tiny_t5), DraftModel(tiny_t5, draft, gamma=3)):
        options = dict(max_new_tokens=25, end_ids=(), sampling=sampling)
        first, *others = (generate(method, PROMPTS[0], **options) for _ in range(2))  # pyright: ignore
        assert [other.ids for other in others] == [first.ids]
        together = generate_batch(method, PROMPTS, seeds=[3, 4, 5], **options)  # pyright: ignore
        assert together[0].ids == first.ids
        assert len({tuple(answer.ids) for answer in together}) == 3
    accepted = [count for answer in together for count in answer.accepted]
    assert min(accepted) == 0
    assert max(accepted) == 3


def test_bfloat16_decodes():
    """Where layers are rearranged for it, T5 still asks them for the dtype of their weights."""
    for kin in ("t5", "t5-v1.1"):
        target = Seq2SeqModel(make_t5(kin).bfloat16(), byte_tokenizer(), name="t")
        found = generate(Plain(target), PROMPTS[0], max_new_tokens=8, end_ids=())
        assert len(found.ids) == 8


@pytest.mark.parametrize("kin", ["t5", "t5-v1.1"])
def test_loading_gives_what_was_saved(tmp_path, kin):
    model = make_t5(kin, eos_token_id=7)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = load_seq2seq(str(tmp_path), dtype="float32", device="cpu")
    expected = Seq2SeqModel(model, byte_tokenizer(), name="t")
    answers = [
        generate(Plain(target), PROMPTS[0], max_new_tokens=20, end_ids=()).ids
        for target in (loaded, expected)
    ]
    assert answers[0] == answers[1]
    assert loaded.end_ids == {7, byte_tokenizer().eos_token_id}
    assert loaded.dtype == torch.float32
    assert loaded.decode(loaded.encode_prompt("translate: so what")) == "translate: so what"


def test_what_cannot_be_loaded_is_told_in_one_sentence(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_seq2seq(str(tmp_path / "missing"))
    (tmp_path / "t5.gguf").touch()
    with pytest.raises(ModelError, match="a GGUF file; expected a hub name or a folder"):
        load_seq2seq(str(tmp_path / "t5.gguf"))
    model, tokenizer = tiny_llama(hidden_size=16)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded as an encoder-decoder model"):
        load_seq2seq(str(tmp_path))


BART = dict(
    vocab_size=VOCAB,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    pad_token_id=0,
)


def refused(model, match):
    with pytest.raises(ModelError, match=match):
        Seq2SeqModel(model, byte_tokenizer(), name="t")


def test_other_encoder_decoder_models_are_refused_by_name():
    """Learned positions, and a bias in every layer, are counted by the models themselves."""
    built = "is not built like T5"
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))  # pyright: ignore
    refused(bart, f"bart {built}")
    settings = dict(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    config = transformers.UMT5Config(**settings, decoder_start_token_id=0)  # pyright: ignore
    refused(transformers.UMT5ForConditionalGeneration(config), f"umt5 {built}")


def test_a_model_with_other_logits_is_refused():
    model = make_t5()
    model.decoder.config.scale_decoder_outputs = False  # the model itself goes on scaling
    refused(model, "t5 computes its logits in another way")


def test_a_model_without_a_start_token_is_refused():
    refused(make_t5(decoder_start_token_id=None), "no decoder_start_token_id")


def test_a_draft_of_another_tokenizer_is_refused(tiny_t5):
    draft = make_seq2seq()
    DraftModel(tiny_t5, draft, gamma=2)
    draft.tokenizer.add_tokens(["one more"])
    DraftModel(tiny_t5, draft, gamma=2)
    draft.tokenizer = renamed(draft.tokenizer, "a", "b")
    with pytest.raises(ModelError, match=r"another tokenizer than .*: id \d+ is 'b' there, exp"):
        DraftModel(tiny_t5, draft, gamma=2)


def renamed(tokenizer, one, other):
    """The same tokenizer with the ids of two tokens exchanged."""
    vocab = tokenizer.get_vocab()
    vocab[one], vocab[other] = vocab[other], vocab[one]
    changed = copy.deepcopy(tokenizer)
    changed.get_vocab = lambda: vocab
    return changed


def test_what_only_causal_models_do_is_refused(tiny_t5):
    with pytest.raises(ModelError, match="trained on causal models only"):
        tiny_t5.hidden_states(torch.tensor([[1, 2]]), torch.ones(1, 2))
    with pytest.raises(ModelError, match="do not run through torch"):
        Plain(tiny_t5, compiled=True)
