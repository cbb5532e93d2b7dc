"""How byte-level vocabularies cut text into words before the merges: a row a rule, with its names in files.

A rule is that of the `tokenizer.json` from which files of its names are made, where this is known, and
llama.cpp's otherwise (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp, and
https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf_update.py for the models of a name), in
the regular expressions of the `tokenizers` library. A name whose rule is not known exactly ("falcon-h1") is
left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    names: tuple[str, ...]  # its names in files
    patterns: tuple[str, ...]  # applied in order: each cuts what it matches out of the rest
    byte_patterns: tuple[str, ...] = ()  # more of them, for the characters that spell bytes
    normalizer: str | None = None  # applied before: the `type` of one of the library's, or None
    ignores_merges: bool = False  # a word that is a token is that token, even where no merges lead to it
    adds_bos: bool = False  # texts begin with the bos token where the file does not say
    spells_bytes: bool = True  # in GPT-2's characters; else text, with tokens as <0x0A>


def _either(*patterns: str) -> str:
    return "|".join(patterns)


# what rules have in common; of alternatives the first that matches counts
DIGIT, DIGITS = r"\p{N}", r"\p{N}{1,3}"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # the long s counts as s; in llama.cpp it does not
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _either(ENDING, WORD, DIGITS, SIGNS, SPACES)
QWEN2 = _either(ENDING, WORD, DIGIT, SIGNS, SPACES)


def _cased(ending: str = "", but: str = "") -> str:
    """Return the rule of words that begin anew at a capital letter; llama.cpp knows those of ASCII alone."""
    capital = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    small = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}{capital}*{small}+{ending}|{before}{capital}+{small}*{ending}"


GPT4O = _either(_cased(f"{ENDING}?"), DIGITS, SIGNS_AND_SLASHES, SPACES)
TEKKEN = _either(_cased(), DIGIT, SIGNS_AND_SLASHES, SPACES)
KIMI = _either(r"[\p{Han}]+", _cased(f"{ENDING}?", r"&&[^\p{Han}]"), DIGITS, SIGNS, SPACES)
YOUTU = _either(_cased(f"{ENDING}?"), DIGIT, SIGNS_AND_SLASHES, SPACES)

# words with their marks
QWEN35 = _either(ENDING, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES)
MARKED = _either(  # one sign of ASCII may lead a word of ASCII
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
DEEPSEEK = _either(MARKED, r" ?[\p{P}\p{S}]+[\r\n]*", SPACES)
SPARK = _either(MARKED, r" ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+")
EXAONE = _either(
    ENDING,
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
    DIGIT,
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
    r"\s*[\r\n]|\s+(?!\S)|\s+",
)

BAILING = _either(
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    DIGIT,
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"\s*[\r\n]|\s+(?!\S)|\s+",
)
LONG_SPACES = _either(
    r"\s*[\r\n]+", *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")), r"\s{1}"
)

# scripts
EAST_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
YOUTU_SCRIPTS = _either(  # Korean, signs, Bopomofo, then Chinese and Japanese
    "[\uac00-\ud7a3\u3131-\u318e]+",
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+",
    "[\u3105-\u312f]+",
    EAST_ASIAN,
)
AFMOE_DIGITS = (  # in threes from the end
    r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}",
    r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)",
    r"\A\p{Nd}{3}|\G\p{Nd}{3}",
)
AFMOE_SCRIPTS = _either(  # Chinese and Japanese, Thai, Lao, Khmer, Burmese, Korean; llama.cpp joins them
    "[\u4e00-\u9fff\u3040-\u309f\u30a0-\u30ff\u3400-\u4dbf\uf900-\ufaff\uff65-\uff9f\u2f00-\u2fdf]+",
    "[\u0e00-\u0e7f]+",
    "[\u0e80-\u0eff]+",
    "[\u1780-\u17ff]+",
    "[\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff]+",
    "[\uac00-\ud7af\u1100-\u11ff]+",
)
LETTERS_WITH_CASE = (  # fewer than Unicode has
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{LETTERS_WITH_CASE}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    ASIAN,
    DIGIT,  # llama.cpp leaves digits together, but the vocabulary joins none
)

NFC = "NFC"
GPT2_NAMES = "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling"
SINGLE_DIGIT_NAMES = "smollm starcoder refact codeshell exaone minerva-7b mellum2"
LLAMA3_NAMES = "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2"
QWEN2_NAMES = "stablelm2 hunyuan solar-open grok-2 megrez kormo"

RULES = (
    # what llama.cpp does where a file says nothing better
    PreTokenizer(("default",), (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    PreTokenizer((*GPT2_NAMES.split(),), (GPT2,)),
    PreTokenizer(("olmo", "mpt"), (GPT2,), normalizer=NFC),  # the tokenizer of GPT-NeoX
    PreTokenizer((*SINGLE_DIGIT_NAMES.split(),), (DIGIT, GPT2)),
    PreTokenizer(("command-r",), (DIGIT, GPT2), normalizer=NFC),
    PreTokenizer((*LLAMA3_NAMES.split(),), (LLAMA3,), ignores_merges=True, adds_bos=True),
    PreTokenizer(("dbrx", "smaug-bpe", "chatglm-bpe"), (LLAMA3,)),
    PreTokenizer(("glm4", "glm5"), (LLAMA3,), ignores_merges=True),
    PreTokenizer(
        ("minicpm5",), (DIGITS, _either(ENDING, WORD, r"\p{N}+", SIGNS, SPACES)), ignores_merges=True
    ),
    PreTokenizer(("jais-2",), (_either(ENDING, WORD, DIGITS, SIGNS, LONG_SPACES),)),
    PreTokenizer(("qwen2", "deepseek-r1-qwen", "f2llmv2"), (QWEN2,), normalizer=NFC),
    PreTokenizer((*QWEN2_NAMES.split(),), (QWEN2,)),
    PreTokenizer(("laguna",), (r"[^\n]+|[\n]+", QWEN2)),
    PreTokenizer(("ufakzeka",), (_either(WORD, DIGIT, SIGNS, SPACES),)),
    PreTokenizer(("seed-coder",), (_either(ENDING, WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", SPACES),)),
    PreTokenizer(("bailingmoe", "bailingmoe2", "llada-moe"), (BAILING,)),
    PreTokenizer(("exaone-moe",), (EXAONE,)),
    PreTokenizer(("qwen35",), (QWEN35,), normalizer=NFC),
    PreTokenizer(("tekken",), (TEKKEN,), ignores_merges=True, adds_bos=True),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (GPT4O,)),
    # llama.cpp counts threes of digits from the end also where a letter follows
    PreTokenizer(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O), normalizer=NFC),
    PreTokenizer(("kimi-k2",), (KIMI,)),
    PreTokenizer(("youtu",), (YOUTU_SCRIPTS, YOUTU), ignores_merges=True),
    PreTokenizer(("deepseek-llm",), DEEPSEEK_LLM),
    PreTokenizer(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, DIGIT)),
    PreTokenizer(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), (DIGITS, EAST_ASIAN, DEEPSEEK)),
    PreTokenizer(("spark2_5",), (DIGITS, EAST_ASIAN, SPARK, DIGIT)),
    PreTokenizer(("afmoe",), (*AFMOE_DIGITS, AFMOE_SCRIPTS, DEEPSEEK)),
    PreTokenizer(("bloom", "poro-chat", "gpt3-finnish"), (BLOOM,)),
    PreTokenizer(("viking",), (BLOOM, DIGIT)),
    # Falcon looks for digits among the characters of bytes, some of which are fractions; llama.cpp does not
    PreTokenizer(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", GPT2), byte_patterns=(r"\p{N}+", "[0-9][0-9][0-9]")),
    PreTokenizer(("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),  # a token may be several words
    PreTokenizer(("gemma4",), (), adds_bos=True, spells_bytes=False),
    PreTokenizer(("sarvam-moe",), (), spells_bytes=False),
)
WORDS = {name: rule for rule in RULES for name in rule.names}
