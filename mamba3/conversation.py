"""Conversation: a chat with a model, which reads every token once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .data.chat import Message, render, turn_end, turn_ends
from .generate_text import Completion, continue_rows

if TYPE_CHECKING:
    from .data.tokenizer import Tokenizer
    from .models.lm import LMState, Mamba3LM


class Conversation:
    """Turns of a user and a model, laid out by the tokenizer's chat template.

    The model's state is kept between turns, so that only what is new is read. Where the template
    lays out earlier turns anew, as some leave out old thoughts, all is read again.

    Args:
        model: the language model.
        tokenizer: the model's, of `load_tokenizer`.
        system: content of a first message of the role "system"; None for none.
        max_new_tokens: the most tokens of an answer, default 512.
        seed: of the sampling; turn i, from 0, takes seed + i.
        options: temperature, top_k, top_p, min_p and repetition_penalty, as `generate` takes them.

    Example:
        >>> talk = Conversation(model, tokenizer, system="Be brief.")
        >>> talk.say("Hello")
        'Hi!'
    """

    def __init__(
        self,
        model: Mamba3LM,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        seed: int | None = None,
        **options,
    ):
        self._model, self._tokenizer = model, tokenizer
        self._system, self._seed = system, seed
        self._options = {"max_new_tokens": max_new_tokens, **options}
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message alone."""
        system = self._system
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._state: LMState | None = None
        self._read = ""  # what the state holds, as text

    def say(self, text: str, *, stream: Callable[[str], None] | None = None) -> str:
        """Say something and return the answer; both become part of the conversation.

        Args:
            text: the user's message.
            stream: called with each piece of the answer as soon as it is settled.

        Raises:
            ValueError: text that the tokenizer or the template cannot take. After this and any
                other error, the conversation is as it was.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, state, read = render(messages, self._tokenizer, True), self._state, self._read
        if not prompt.startswith(read):
            state, read = None, ""
        eos, stop = turn_ends(self._tokenizer)
        turns = sum(message["role"] == "user" for message in self.messages)
        [answer], state = continue_rows(
            self._model,
            self._tokenizer,
            [self._tokenizer.encode(prompt[len(read) :])],
            stop=stop,
            eos_token_id=eos,
            stream=None if stream is None else lambda _, piece: stream(piece),
            state=state,
            return_state=True,
            seed=None if self._seed is None else self._seed + turns,
            **self._options,
        )
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._state, self._read = state, prompt + self._as_read(answer)
        return answer.text

    def _as_read(self, answer: Completion) -> str:
        """An answer as the state holds it: with the token or the string that ended it."""
        if answer.ended_by != "eos":
            return self._tokenizer.decode(answer.ids)
        if answer.ids[-1] == self._tokenizer.eos_token_id:
            return answer.text + self._tokenizer.special_tokens["eos_token"]
        return answer.text + turn_end(self._tokenizer)
