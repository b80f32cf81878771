import pytest
from chat_case import SAID, make_speaker
from decoding_case import make_llama

from medusa_train.chat.conversation import Conversation
from medusa_train.errors import DataError, ModelError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ CONTENT }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def backbone():
    """Its own, since tests change the template."""
    return make_speaker()


def use(backbone, content: str) -> None:
    """A template that writes `content` for that of each turn."""
    backbone.tokenizer.chat_template = TEMPLATE.replace("CONTENT", content)


def test_the_first_question_is_put_as_everywhere_else(backbone):
    for system in (None, "Be brief."):
        asked = Conversation(backbone, system).ask("Why?")

        assert asked.ids == backbone.encode_prompt("Why?", system)


def test_a_later_question_stands_behind_the_whole_conversation(backbone):
    conversation = Conversation(backbone, "Be brief.")
    answer = backbone.tokenise("Because.<|im_end|>")
    conversation.note(conversation.ask("Why?"), answer)

    turns = [("system", "Be brief."), ("user", "Why?"), ("assistant", "Because."), ("user", "So?")]
    wanted = backbone.render([{"role": role, "content": text} for role, text in turns])
    assert conversation.ask("So?").ids == backbone.tokenise(wanted)
    assert conversation.turns == [{"role": role, "content": text} for role, text in turns[:-1]]


def test_asking_alone_changes_nothing(backbone):
    conversation = Conversation(backbone, None)
    conversation.ask("Why?")

    assert conversation.turns == []
    assert conversation.ask("So?").ids == backbone.encode_prompt("So?", None)


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
@pytest.mark.parametrize("content", ["m['content']", "m['content'] | trim"])
def test_answers_go_on_as_the_very_ids_of_the_model(content, end, backbone):
    """Also those whose text would come out as other ids, cut short or not."""
    use(backbone, content)
    conversation = Conversation(backbone, None)
    broken = backbone.tokenise(SAID)[:5] + backbone.tokenise("€")[:2] + backbone.tokenise(" ")
    asked = conversation.ask("Why?")
    conversation.note(asked, broken + backbone.tokenise(end))

    following = backbone.tokenise("<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n")
    header = backbone.tokenise("<|im_start|>assistant\n")
    assert conversation.ask("So?").ids == [*asked.ids, *broken, *following, *header]


def test_a_template_that_writes_answers_in_another_way_is_followed(backbone):
    use(backbone, "m['content'].split('</think>')[-1]")
    conversation = Conversation(backbone, None)
    conversation.note(conversation.ask("Why?"), backbone.tokenise("Hm.</think>Because."))

    text = backbone.tokenizer.decode(conversation.ask("So?").ids)
    assert "assistant\nBecause.<|im_end|>\n" in text
    assert "Hm." not in text


def test_a_tokenizer_that_reads_a_text_in_another_way_alone_reads_the_whole(backbone, monkeypatch):
    conversation = Conversation(backbone, None)
    conversation.note(conversation.ask("Why?"), backbone.tokenise("Because."))
    plainly = backbone.tokenise
    starts = "<|im_start|>"

    def with_a_mark(text: str) -> list[int]:
        ids = plainly(text)
        return ids if text.startswith(starts) else [*plainly(" "), *ids]

    monkeypatch.setattr(backbone, "tokenise", with_a_mark)
    asked = conversation.ask("So?")

    assert asked.ids == plainly(asked.rendered)


def test_a_full_context_is_refused_and_the_conversation_stays(backbone):
    small = make_speaker(context=100)
    conversation = Conversation(small, None)
    conversation.note(conversation.ask("Why?"), small.tokenise("Because."))
    turns = list(conversation.turns)
    room = 100 - len(conversation.ask("").ids)  # each letter is a token

    assert len(conversation.ask("x" * (room - 1)).ids) == 99
    with pytest.raises(DataError, match=r"would have 100 tokens.* context of 100 .*/reset"):
        conversation.ask("x" * room)
    assert conversation.turns == turns


def test_a_model_without_a_template_is_refused_at_once():
    backbone = make_llama()
    backbone.tokenizer.chat_template = None

    with pytest.raises(ModelError, match="no chat template"):
        Conversation(backbone, None)


def test_a_template_without_system_prompts_refuses_one_at_once(backbone):
    backbone.tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + TEMPLATE.replace("CONTENT", "m['content']")
    )

    Conversation(backbone, None)
    with pytest.raises(ModelError, match="no system role"):
        Conversation(backbone, "Be brief.")
