"""Strings on which tokenizers are compared: each kind of text that a rule for words treats in its own way.

And metadata of GGUF files with small vocabularies, on which a rule that cuts or joins wrongly shows. The strings are a function of the count and the seed. Every kind comes equally often: alone, and joined with other kinds.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from foredraft.model.gguf.vocabulary import vocabulary_of

PROSE = (
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, Zürich, señor, œuvre, Łódź",
    "Speculative decoding keeps the target's output.",
    "“Quotes” — dashes… and (brackets), [more] {of} them!",
    "camelCase HTTPServer XMLHttpRequest snake_case SCREAMING_CASE mixedUPPERlower",
    "https://example.org/a/b?c=d&e=%20f#g user.name+tag@mail.example.co.uk",
    "ǅ ǈ ᾈ titlecase, ʰʲ modifiers, ªº ordinals, ſtrasse ŉ ﬁ ligatures",
)
CODE = (
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nprint(f(3))\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n\t}\n",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';--",
    '{"key": [1, 2.5, -3e10, null], "other": "\\n\\t"}',
    "#include <stdio.h>\r\n\r\nint main(void)\r\n{\r\n  return 0;\r\n}\r\n",
    "<div class='a'><b>bold</b><br/></div><!-- x -->",
    "a/b//c///d ../../e\\f\\\\g /\n//\n/* */",
)
SCRIPTS = (
    "我想在 apple 工作1314151天～，你好。漢字かな交じり文、カタカナ！",
    "ㄅㄆㄇ 한국어 띄어쓰기 ㅋㅋㅋ 조사",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤٥ 123",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया क्षत्रिय १२३४",
    "কান্তি তামিল தமிழ் ไทยแลนด์ ภาษาไทย ລາວ កាន់តែពិសេស မြန်မာ",
    "нещо на Български, Ελληνικά, Հայերեն, ქართული, ᏣᎳᎩ",
    "𝐦𝐚𝐭𝐡 𐐀𐐨 𠀀𠀁 𞤀𞤢",
)
MARKS = (
    "e\u0301 a\u0308\u0323 n\u0303 o\u0302\u0301\u0323 \u0301start",
    "Z\u0351\u036b\u0343algo\u0321\u0353 \u20dd1\u20e3 \u0345",
    "\u1100\u1161\u11a8 \u212b \u2126 \ufb01 \u01c4 \u0958 \uf900",  # texts that a normalisation changes
)
EMOJI = ("🚀 😶‍🌫️ ✅ 🦙🦙", "👩🏽‍💻👨‍👩‍👧‍👦", "🇫🇷🇯🇵 1️⃣ ☃️ ♥", "(╯°□°)╯︵ ┻━┻ ツ")
DIGITS = ("1", "12", "123", "1234", "1234567890", "3.14159", "1,000,000")
DIGITS += ("½ ² Ⅷ ④ ٣٤ １２３４ ൰", "0x1F 1e-9", "v1.2.3-rc4")
SPACES = (" ", "  ", "   ", *"\t\n\r", "\r\n", *"\v\f\x85\xa0\u2003\u2028\u202f\u3000")
SPACES += (*"\u200b\ufeff\u180e\u1680\x1c",)  # some libraries count these as white space
CONTRACTIONS = (
    *"I've he'LL DON'T we'Re 'S it's you'd 'm o'clock l'été it’s WE’VE 'ſ x'sy '\u212a ''t".split(),
)
CONTRACTIONS += ("rock 'n' roll", "türkiye'nin")
SPECIAL = (*"<|endoftext|> <|im_start|> <|im_end|> <bos> <eos> <pad> <unk> <mask> <s> </s>".split(),)
SPECIAL += ("<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_image>", "<|eot_id|>", "<|begin_of_text|>")
SPECIAL += ("[INST]", "<|im_start", "im_end|>", "<|im_end|", "< bos>", "<0x0A>", "<0xE2>", "<unused7>")
SPECIAL += ("[multimodal]", "<table>", "<h1>")
BLOCKS = ("\u2581", "\u2581\u2581", "\u2581a", "a\u2581b", " \u2581 ", "\u2581the", "Ġ", "Ċthe", "##ing")
ODD = (*"\x00\x07\x7f\ufffd\u200d\u2060\ue000\U000e0041\uffff\U0010fffd\u0378",)
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~«»¿¡§¶•–—‘’“”…、。！？｡￥€£₿°±×÷≠∞"


def strings(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    kinds = [*KINDS.values(), _mixture, _glued]
    return [kinds[at % len(kinds)](draw) for at in range(count)]


def _words(texts: tuple[str, ...]) -> Callable[[random.Random], str]:
    def kind(draw: random.Random) -> str:
        text = draw.choice((" ", "", "\n", "  ")).join(draw.choices(texts, k=draw.randint(1, 3)))
        start = draw.choice((0, draw.randrange(len(text))))
        return text[start : start + draw.randint(1, 60)]

    return kind


def _runs(draw: random.Random) -> str:
    parts = [draw.choice(SPACES) * draw.choice((1, 1, 2, 3, 5, 31, 40)) for _ in range(draw.randint(1, 4))]
    return "".join(part + draw.choice(("", "a", "word", "1", ".", "é")) for part in parts)


def _numbers(draw: random.Random) -> str:
    run = "".join(draw.choices("0123456789", k=draw.randint(1, 12)))
    before = draw.choice(("", " ", "a", "-", "$", "\n"))
    return before + run + draw.choice(("", "a", " ", ".", draw.choice(DIGITS)))


def _punctuation(draw: random.Random) -> str:
    return "".join(draw.choices(PUNCTUATION + "  \n\rab1", k=draw.randint(1, 16)))


def _characters(draw: random.Random) -> str:
    ends = (0x80, 0x800, 0x10000, 0x110000)
    drawn = [draw.randrange(draw.choice(ends)) for _ in range(draw.randint(1, 12))]
    return "".join(chr(each) for each in drawn if not 0xD800 <= each < 0xE000)


KINDS: dict[str, Callable[[random.Random], str]] = {
    "prose": _words(PROSE),
    "code": _words(CODE),
    "scripts": _words(SCRIPTS),
    "marks": _words(MARKS),
    "emoji": _words(EMOJI),
    "digits": _words(DIGITS),
    "numbers": _numbers,
    "spaces": _runs,
    "contractions": _words(CONTRACTIONS),
    "special": _words(SPECIAL),
    "blocks": _words(BLOCKS),
    "odd": _words(ODD),
    "punctuation": _punctuation,
    "characters": _characters,
}


def _mixture(draw: random.Random) -> str:
    kinds = draw.choices([*KINDS.values()], k=draw.randint(2, 4))
    return "".join(kind(draw)[:24] + draw.choice(("", *SPACES)) for kind in kinds)


def _glued(draw: random.Random) -> str:
    pieces = (*SPECIAL, *BLOCKS, *SPACES, *CONTRACTIONS, *DIGITS, "a", "Ab", " x")
    return "".join(draw.choice(pieces) for _ in range(draw.randint(2, 6)))


KEY = "tokenizer.ggml."
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
PIECES = [SPACE, *"abcdeht", *f"{SPACE}t he {SPACE}the at cat ca ab {SPACE}a abc bc".split()]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = [0.0] * 259 + [-float((rank * 7) % 50) for rank in range(len(PIECES))]
    found = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    found |= {"tokens": tokens, "token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)], "scores": scores}
    return {KEY + name: value for name, value in (found | changes).items()}


def byte_level(pre: Any, **changes: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary over bytes, whose merges cross every border that a rule may draw."""
    tokens, merges = _spanning()
    found = {"model": "gpt2", "pre": pre, "eos_token_id": len(tokens), "add_bos_token": False}
    found |= {"tokens": [*tokens, "<|end|>", "[PAD]"], "token_type": [*[1] * len(tokens), 3, 5]}
    found["merges"] = [*merges]
    return {KEY + name: value for name, value in (found | changes).items()}


def tokenizer_of(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    found = vocabulary_of(metadata)
    assert found is not None
    return tokenizers.Tokenizer.from_str(found[0])


@functools.cache
def _spanning() -> tuple[tuple[str, ...], tuple[str, ...]]:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([text for text in strings(2000, seed=1) if "<" not in text], trainer)
    model = json.loads(made.to_str())["model"]
    tokens = tuple(sorted(model["vocab"], key=model["vocab"].__getitem__))
    return tokens, tuple(" ".join(pair) for pair in model["merges"])
