"""A tokenizer for tests whose tokens can be counted by hand: one token per character and per template mark."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, TURN, END = "_", "<", ">"
LETTERS = [PAD, TURN, END, *string.ascii_lowercase, *string.digits, " ", "?"]
MARKED = (
    "{% for m in messages %}{{ '<' + m['role'][0] }}{% if m['role'] == 'assistant' %}{% generation %}{{ "
    "m['content'] + '>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '>' }}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def letter_tokenizer(chat_template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """Return the tokenizer: a user's "hi" becomes `<uhi> `, and `<a` starts an answer."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token="?", chat_template=chat_template
    )


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]
