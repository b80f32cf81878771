"""The turns of a chat as text, and as the token ids that the next answer starts from."""

from dataclasses import dataclass

from medusa_train.errors import DataError
from medusa_train.model.backbone import Backbone


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A conversation up to a question that is to be answered."""

    question: str
    rendered: str
    ids: list[int]


class Conversation:
    """What was said so far.

    Answers go on as the very ids that the model produced: tokenised again, the same text can come
    out as ids that the model never chose. Where the template writes an answer in another way than
    it was given (without its reasoning, for one), the rendered text is tokenised as a whole, since
    the model was trained to see what the template writes.
    """

    def __init__(self, backbone: Backbone, system: str | None) -> None:
        """Begin with a system prompt, or with nothing but what the template puts there.

        Raises:
            ModelError: if the template refuses such turns.
        """
        self._backbone = backbone
        self.turns: list[dict[str, str]] = []
        if system is not None:
            self.turns.append({"role": "system", "content": system})
        self._rendered, self._said, self._ids = "", "", []
        self.ask("a first question")  # a template that refuses does so now

    def ask(self, question: str) -> Asked:
        """Put one more question; the conversation stays as it is until it is answered.

        Raises:
            ModelError: if the template refuses it.
            DataError: if the context has no room for an answer.
        """
        turns = [*self.turns, {"role": "user", "content": question}]
        rendered = self._backbone.render(turns)
        ids = self._continued(rendered, self._backbone.tokenise(rendered))
        limit = self._backbone.max_positions
        if len(ids) >= limit:
            raise DataError(
                f"the conversation would have {len(ids)} tokens, and the model's context of "
                f"{limit} leaves no room for an answer: ask less, or begin anew with /reset"
            )
        return Asked(question=question, rendered=rendered, ids=ids)

    def note(self, asked: Asked, answer: list[int]) -> None:
        """Keep a question and its answer, cut short or not."""
        ids = list(answer)
        if ids and ids[-1] in self._backbone.end_ids:
            ids.pop()  # the template writes the end of a turn
        self._rendered, self._said = asked.rendered, self._backbone.decode(ids)
        self._ids = [*asked.ids, *ids]
        self.turns += [
            {"role": "user", "content": asked.question},
            {"role": "assistant", "content": self._said},
        ]

    def _continued(self, rendered: str, whole: list[int]) -> list[int]:
        """The known ids and those of what is new, if both make up `rendered`; else `whole`."""
        if not self._ids:
            return whole
        for said in (self._said, self._said.strip()):
            known = self._rendered + said
            if rendered.startswith(known):
                new = self._backbone.tokenise(rendered[len(known) :])
                # A tokenizer may read a text in another way where it stands alone
                if whole[len(whole) - len(new) :] == new:
                    return [*self._ids, *new]
        return whole
