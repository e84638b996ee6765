"""engine/grammar.py: what may come next, for schemas and regexes, good, bad and hostile.

Most tests walk: they take allowed tokens at random, as a model would that knows nothing.
"""

from __future__ import annotations

import builtins
import gc
import json
import random
import re
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from engine.grammar import MAX_MULTIPLE, Grammar, Vocabulary, bits_of
from engine.params import MAX_GRAMMAR
from engine.run import main, schema_of, warn_if_cut
from engine.sampler import Sampler, SamplingParams
from engine.tokenizer import Tokenizer

pytest.importorskip("llguidance")

ASSETS = Path(__file__).resolve().parent.parent / "engine" / "assets"
TINY = Tokenizer.from_dir(ASSETS)
VOCAB = TINY.n_ids + 37  # ids that no token has, and a last word that is not full


def one_token_a_byte() -> Tokenizer:
    """Ids 0 to 255 are bytes, in the order of GPT-2's alphabet; 256 is <eos>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    rust = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    rust.decoder = tokenizers.decoders.ByteLevel()
    rust.add_special_tokens(["<eos>"])
    return Tokenizer(rust, frozenset({256}), 257)


BYTES = one_token_a_byte()
QWEN3_VOCAB = 151_936
ID_OF = {BYTES.bytes_of(i): i for i in range(256)}
EOS = 256


def of(tokenizer=BYTES, vocab_size=257, eos_ids=(EOS,), after=None, **params) -> Grammar:
    return Grammar.of(SamplingParams(**params), tokenizer, vocab_size, eos_ids, after)


@pytest.fixture(scope="module")
def qwen3(qwen3_tokenizer_dir) -> Tokenizer:
    """The real one, in llguidance's form already."""
    tokenizer = Tokenizer.from_dir(qwen3_tokenizer_dir)
    of(tokenizer, QWEN3_VOCAB, regex="a")
    return tokenizer


def ids_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def bytes_allowed(grammar: Grammar) -> bytes:
    return b"".join(sorted(BYTES.bytes_of(i) for i in ids_of(grammar.allowed())))


def take(grammar: Grammar, text: str | bytes) -> Grammar:
    for byte in text.encode() if isinstance(text, str) else text:
        grammar.take(ID_OF[bytes([byte])])
    return grammar


def refusal(tokenizer=BYTES, vocab_size=257, **params) -> str:
    """The one line that a grammar is refused with, before any token."""
    with pytest.raises(ValueError) as e:
        of(tokenizer, vocab_size, **params)
    assert "\n" not in str(e.value) and len(str(e.value)) < 400
    return str(e.value)


def fits(value, schema) -> bool:
    """Whether a value is of a schema, for the keywords that the schemas here have."""
    if isinstance(schema, bool):
        return schema
    kind = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
    name = kind.get(type(value), "null" if value is None else "number")
    wanted = schema.get("type")
    if wanted and name != wanted and (name, wanted) != ("integer", "number"):
        if not (wanted == "integer" and name == "number" and value == int(value)):
            return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "anyOf" in schema and not any(fits(value, each) for each in schema["anyOf"]):
        return False
    if name == "object":
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", ())) <= set(value) and all(
            fits(item, known.get(key, rest)) for key, item in value.items()
        )
    if name == "array":
        low, high = schema.get("minItems", 0), schema.get("maxItems", 10**9)
        return low <= len(value) <= high and all(fits(i, schema.get("items", True)) for i in value)
    if name == "string":
        low, high = schema.get("minLength", 0), schema.get("maxLength", 10**9)
        return low <= len(value) <= high and bool(re.search(schema.get("pattern", ""), value))
    if name in ("integer", "number"):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return True


def is_json_of(schema):
    def accepts(text: str) -> bool:
        try:
            return fits(json.loads(text), schema) and text == text.strip()
        except ValueError:
            return False

    return accepts


def walk(grammar: Grammar, tokenizer: Tokenizer, ends, accepts, rng, limit: int) -> str | None:
    """A text made of allowed tokens, None if it was cut. At each step an end is allowed where, and
    only where, the text is accepted."""
    silent = set(tokenizer.added_ids.values()) - set(ends)
    made = b""
    for _ in range(limit):
        allowed = ids_of(grammar.allowed())
        assert allowed and not silent & set(allowed) and allowed[-1] < tokenizer.n_ids
        texts = [i for i in allowed if i not in ends]
        try:
            whole = accepts(made.decode())
        except UnicodeDecodeError:
            whole = False
        assert whole == bool(set(ends) & set(allowed)) == (set(ends) <= set(allowed)), made
        assert grammar.is_finished == (not texts)
        if not texts or (whole and rng.random() < 0.3):
            grammar.take(rng.choice(list(ends)))
            assert grammar.is_finished and set(ids_of(grammar.allowed())) == set(ends)
            return made.decode()
        closing = [i for i in texts if set(tokenizer.bytes_of(i)) & set(b'"}].')]
        token = rng.choice(closing if closing and rng.random() < 0.4 else texts)
        made += tokenizer.bytes_of(token)
        grammar.take(token)
    return None


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "青い"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS = [
    {"type": "object"},
    True,
    PERSON,
    {"enum": ["one", 2, None, True, '\n"quoted"']},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{2,5}$"}]},
    {"type": "integer", "minimum": -20, "maximum": 300},
]
REGEXES = [
    r"[A-Z][a-z]+( [a-z]+)*\.",
    r"\(\d{3}\) \d{3}-\d{4}",
    r"(yes|no|perhaps)",
    r"a*",
    r"",
    r"é+[漢字]{1,3}😸?",
    r"^ab?c$",
    "a/b\\/c\n|x\\\\y",
    r".{0,12}",
    r"(?i:abc)[^\x00-\x7f]",
]
CASES = [({"json_schema": s}, is_json_of(s)) for s in SCHEMAS] + [
    ({"regex": r}, lambda text, r=r: bool(re.fullmatch(r, text))) for r in REGEXES
]


@pytest.mark.parametrize(("params", "accepts"), CASES, ids=lambda c: str(c)[:50])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("tokenizer", "size"), [(BYTES, 300), (TINY, VOCAB)], ids=["bytes", "bpe"])
def test_walks(params, accepts, seed, tokenizer, size):
    """A text that is not what was asked for, an end before it is or none when it is, an empty mask,
    an id that has no text."""
    ends = tuple(tokenizer.eos_ids)
    rng, whole = random.Random(seed), 0
    for _ in range(6):
        text = walk(of(tokenizer, size, ends, **params), tokenizer, ends, accepts, rng, 120)
        whole += text is not None
    assert whole >= 1, "no walk came to an end: what was tested?"


@pytest.mark.parametrize("params", [{"json_schema": PERSON}, {"regex": r"[A-Z]\w+( \w+)*\."}])
def test_walks_with_a_large_vocabulary(params, qwen3):
    """The slices of a large vocabulary that llguidance looks up instead of walking."""
    ends = 151_645, 151_643
    test = is_json_of(PERSON)
    if "regex" in params:
        test = re.compile(params["regex"]).fullmatch
    rng, whole = random.Random(0), 0
    for _ in range(5):
        grammar = of(qwen3, QWEN3_VOCAB, ends, **params)
        text = walk(grammar, qwen3, ends, lambda t: bool(test(t)), rng, 100)
        whole += text is not None
    assert whole


def test_nothing_is_asked_for():
    """A request without a grammar that pays for one, or is refused for want of a tokenizer."""
    assert Grammar.of(SamplingParams(), None, 257, (EOS,)) is None


def test_keys_in_the_schema_s_order():
    """A schema whose keys were sorted: the output's order is the schema's."""
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}}
    schema |= {"required": ["a", "z"], "additionalProperties": False}
    grammar = of(json_schema=schema)
    take(grammar, '{"')
    assert bytes_allowed(grammar) == b"z"


def test_white_space_ends():
    """White space without a bound, in which weak models spend all their tokens; or indents that a
    pretty-printed answer needs refused."""
    for space in (" ", "\n" + " " * 24, "\n" + "\t" * 24):
        grammar = of(json_schema={"type": "object"})
        take(grammar, "{" + space)
        assert not set(b" \t\n") & set(bytes_allowed(grammar))
        assert ord("}") in bytes_allowed(grammar)


def test_no_remote_reference(tmp_path):
    """A schema that makes us read a file, or ask a server."""
    file = tmp_path / "schema.json"
    file.write_text("{}")
    for place in (file.as_uri(), "http://127.0.0.1:9/x"):
        assert "json_schema cannot be used" in refusal(json_schema={"$ref": place})


# --- ends ---


def test_several_ends():
    """Only the first of a model's end tokens allowed; or one before the end."""
    grammar = of(TINY, VOCAB, (0, 1, VOCAB - 1, VOCAB + 5), regex="ab?")
    assert not {0, 1, VOCAB - 1} & set(ids_of(grammar.allowed()))
    grammar.take(TINY.encode("a")[0])
    assert {0, 1, VOCAB - 1} <= set(ids_of(grammar.allowed())) and not grammar.is_finished
    grammar.take(VOCAB - 1)
    assert grammar.is_finished and ids_of(grammar.allowed()) == [0, 1, VOCAB - 1]


def test_an_end_that_has_a_text():
    """An end token that is allowed inside the text, where taking it would end the request."""
    b = ID_OF[b"b"]
    grammar = of(eos_ids=(EOS, b), regex="a[bc]c")
    take(grammar, "a")
    assert bytes_allowed(grammar) == b"c"
    take(grammar, "cc")
    assert ids_of(grammar.allowed()) == sorted((b, EOS))


def test_no_ends():
    """Without end tokens, or where they are ignored, a text that is whole never ends."""
    for given in ({"eos_ids": ()}, {"ignore_eos": True}):
        grammar = of(regex="ab?", **given)
        take(grammar, "a")
        assert not grammar.is_finished and bytes_allowed(grammar) == b"b"
        take(grammar, "b")
        assert grammar.is_finished and not grammar.allowed().any()


def test_what_is_not_allowed_is_refused():
    """A token taken against the mask: what follows would be nonsense, or crash."""
    grammar = of(regex="ab")
    for token in (ID_OF[b"b"], EOS, 256, 299, -1, 10**9):
        with pytest.raises(ValueError, match=f"does not allow token id {token}"):
            grammar.take(token)
    assert bytes_allowed(take(grammar, "a")) == b"b"


def test_characters_in_parts():
    """A character of several bytes: its first is refused, or an end is allowed within it."""
    grammar = of(regex="é|ê|😸")
    take(grammar, "é".encode()[:1])
    assert EOS not in ids_of(grammar.allowed())
    assert bytes_allowed(grammar) == "éê".encode()[1::2]
    assert take(grammar, "é".encode()[1:]).is_finished


def test_digits_are_ascii():
    r"""Devanagari digits, which \d means too, in what is to be a number."""
    assert bytes_allowed(of(regex=r"\d")) == b"0123456789"


# --- copies ---


def test_copies_are_independent():
    """A copy that guesses ahead, and with it its original or its siblings."""
    grammar = take(of(json_schema=PERSON), '{"na')
    before = grammar.allowed().copy()
    first, second = grammar.copy(), grammar.copy()
    take(first, 'me":"x",')
    assert (grammar.allowed() == before).all() and (second.allowed() == before).all()
    again = take(second.copy(), 'me":"x",')
    assert (again.allowed() == first.allowed()).all()
    first.take(ID_OF[b'"'])
    assert not (again.allowed() == first.allowed()).all()
    with pytest.raises(ValueError):
        grammar.allowed()[0] = 1


def test_copies_before_the_answer():
    """A copy that shares how much of the close tag has come."""
    grammar = of(regex="a", after=(7, 8))
    grammar.take(7)
    copy = grammar.copy()
    copy.take(8)
    assert grammar.is_free and not copy.is_free


# --- thoughts first ---


def test_after():
    """Thoughts that are constrained, an answer that is not, or a tag found where it only began."""
    grammar = of(regex="ab", after=(7, 7, 8))
    for token in (7, 8, 7, 7, 7, EOS):
        grammar.take(token)
        assert grammar.is_free and not grammar.is_finished
    for token in (7, 7, 7, 8):
        assert grammar.is_free
        grammar.take(token)
    assert bytes_allowed(grammar) == b"\na"
    take(grammar, "ab")
    assert grammar.is_finished


@pytest.mark.parametrize("newlines", range(3))
def test_newlines_after_the_tag(newlines):
    """Newlines, with which models begin an answer, refused; or any number of them allowed."""
    grammar = of(json_schema={"type": "object"}, after=(7,))
    grammar.take(7)
    take(grammar, "\n" * newlines)
    assert bytes_allowed(grammar) == (b"{" if newlines == 2 else b"\n{")
    assert b"}" in bytes_allowed(take(grammar, "{"))


def test_no_newlines_without_a_tag():
    """Newlines before JSON where no thoughts came."""
    assert bytes_allowed(of(json_schema={"type": "object"})) == b"{"


# --- what is refused ---


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "a{3,2}"}, "repetition"),
        ({"regex": r"[^\x00-\U0010ffff]"}, "no text satisfies it"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "nested"),
        ({"json_schema": False}, "no text satisfies"),
        ({"json_schema": {"type": "objec"}}, "objec"),
        ({"json_schema": {"$ref": "#/x"}}, "/x"),
        ({"json_schema": {"$ref": "#"}}, "no text satisfies it"),
        ({"json_schema": {"enum": []}}, "nsatisfiable"),
        ({"json_schema": {"not": {}}}, "not"),
        ({"json_schema": {"type": "string", "pattern": "(a"}}, "unclosed group"),
        ({"json_schema": {"type": "string", "format": "zork"}}, "zork"),
        ({"json_schema": {"multipleOf": 999_983}}, f"above {MAX_MULTIPLE}"),
        ({"json_schema": {"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}}, "multipleOf is"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_used(params, said):
    """A traceback, a page of text or another grammar instead of a line that says what is wrong."""
    message = refusal(**params)
    assert message.startswith(f"{next(iter(params))} cannot be used") and said in message


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": ""}, "not JSON"),
        ({"json_schema": "null"}, "an object, True or False"),
        ({"json_schema": "[1]"}, "an object, True or False"),
        ({"json_schema": 3}, "an object, True or False"),
        ({"json_schema": {"a": {1, 2}}}, "not JSON"),
        ({"json_schema": {"minimum": float("nan")}}, "not JSON"),
        ({"json_schema": '{"a":' * 9000 + "1" + "}" * 9000}, "nested too deeply"),
        ({"json_schema": r'{"const": "\ud800"}'}, "surrogate"),
        ({"json_schema": '{"const": "' + "x" * MAX_GRAMMAR + '"}'}, f"at most {MAX_GRAMMAR}"),
        ({"json_schema": {"const": "é" * (MAX_GRAMMAR // 2)}}, f"at most {MAX_GRAMMAR}"),
        ({"regex": 3}, "a text is needed"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"regex": "é" * MAX_GRAMMAR}, f"at most {MAX_GRAMMAR}"),
        ({"regex": "a", "json_schema": True}, "both given"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_at_the_door(params, said):
    """Nonsense that is found when a model has already been loaded."""
    with pytest.raises(ValueError) as e:
        SamplingParams(**params)
    assert said in str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 400


def test_params_stay_plain():
    """Params with a grammar that cannot be keys, or do not come back from JSON."""
    nested: dict = {"b": {"y": [1, 2.5, None]}, "a": {"z": "é"}}
    params = SamplingParams(json_schema=nested)
    assert params.json_schema == '{"b":{"y":[1,2.5,null]},"a":{"z":"é"}}'
    assert hash(params) == hash(SamplingParams(json_schema=json.dumps(nested, indent=3)))
    for each in (params, SamplingParams(json_schema=True), SamplingParams(regex="a+")):
        assert SamplingParams(**json.loads(json.dumps(vars(each)))) == each


def test_without_the_package(monkeypatch):
    """A traceback, or "no module", for who has not installed the extra."""
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == "llguidance":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for params in ({"regex": "a"}, {"json_schema": True}):
        assert '".[grammar]"' in refusal(**params)
    assert Grammar.of(SamplingParams(), BYTES, 257, (EOS,)) is None


def test_without_a_tokenizer():
    """A checkpoint without a tokenizer serves ids: a grammar has no text to look at."""
    assert "tokenizer.json" in refusal(tokenizer=None, regex="a")


def test_a_tokenizer_that_lacks_bytes():
    """An empty mask, or an output cut in silence, where no token spells what must come."""
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    rust.decoder = tokenizers.decoders.ByteLevel()
    few = Tokenizer(rust, frozenset(), 2)
    assert "cannot spell" in refusal(few, 2, regex="c")
    grammar = of(few, 2, (), regex="a?bc")
    with pytest.raises(ValueError, match="cannot spell"):
        grammar.take(1)


# --- hostile ones ---

HOSTILE = {
    "backtracking": {"regex": "(a+)+$"},
    "many states": {"regex": "(a|b)*a(a|b){30}"},
    "many states of any": {"regex": ".*a.{50}b"},
    "long": {"regex": "a{1000000}"},
    "repeated": {"regex": "((a{0,100}){0,100}){0,100}"},
    "repeated words": {"regex": r"(\w{0,1000}){0,1000}"},
    "words": {"regex": "|".join(f"w{i * 7919 % 100_003}" for i in range(8000))},
    "enum": {"json_schema": {"enum": [f"v{i * 7919 % 100_003}" for i in range(6000)]}},
    "options": {"json_schema": {"properties": {f"p{i}": True for i in range(4000)}}},
    "length": {"json_schema": {"type": "string", "minLength": 10**6, "maxLength": 10**7}},
    "items": {"json_schema": {"type": "array", "items": True, "minItems": 10**8}},
    "multiple": {"json_schema": {"type": "integer", "multipleOf": 99_991}},
    "anyOf in allOf": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"{c}{i}": {"type": "null"}}} for c in "ab"]}
                for i in range(24)
            ]
        }
    },
    "references": {
        "json_schema": {
            "$ref": "#/$defs/0",
            "$defs": {
                str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 1}"}]}
                for i in range(40)
            }
            | {"40": {"type": "integer"}},
        }
    },
    "deep": {"json_schema": '{"items":' * 60 + "{}" + "}" * 60},
    "deeper": {"json_schema": '{"items":' * 900 + "{}" + "}" * 900},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name, qwen3):
    """A request of a few kB that takes minutes, all the memory or the process. It may be refused,
    at first or later, in one line."""
    rng, began = random.Random(0), time.process_time()
    try:
        grammar = of(qwen3, QWEN3_VOCAB, (151_645,), **HOSTILE[name])
        for _ in range(100):
            choices = [i for i in ids_of(grammar.allowed()) if i != 151_645]
            if not choices:
                break
            grammar.take(rng.choice(choices))
    except ValueError as e:
        assert "cannot be used" in str(e) and "\n" not in str(e) and len(str(e)) < 400
    assert time.process_time() - began < 20  # the slowest takes 3 s


def test_threads():
    """Two threads that make the vocabulary twice, or whose grammars meet in it."""
    tokenizer, texts, errors = one_token_a_byte(), [], []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            start.wait()
            for n in range(10):
                grammar = of(tokenizer, json_schema=PERSON)
                rng = random.Random(n)
                texts.append((n, walk(grammar, BYTES, (EOS,), is_json_of(PERSON), rng, 80)))
        except Exception as e:  # told where it is seen
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(texts) == 40 and len(set(texts)) == 10
    assert len(Vocabulary._made[tokenizer]) == 1


def test_a_vocabulary_goes_with_its_tokenizer():
    """Models that are opened one after another, and tables of 150,000 tokens that stay."""
    tokenizer = one_token_a_byte()
    of(tokenizer, regex="a")
    vocabulary = weakref.ref(Vocabulary.of(tokenizer, 257, frozenset()))
    assert vocabulary() is Vocabulary.of(tokenizer, 257, frozenset())
    del tokenizer
    gc.collect()
    assert vocabulary() is None


# --- with the sampler ---


@pytest.mark.parametrize("temperature", [0, 1])
def test_sampler(temperature):
    """A token that is not allowed because it was likely; logprobs of what the mask left."""
    params = SamplingParams(regex="[ab]c*", temperature=temperature, seed=0, logprobs=2)
    logits = np.random.default_rng(0).normal(size=272).astype(np.float32)
    logits[ID_OF[b"x"]] = 30
    raw = logits[:257].astype(np.float64)
    expected = raw - np.log(np.exp(raw).sum())
    for _ in range(20):
        grammar, sampler = Grammar.of(params, BYTES, 257, (EOS,)), Sampler(params, 257)
        for _ in range(6):
            sampler.mask(grammar.allowed())
            allowed, token = ids_of(grammar.allowed()), sampler(logits)
            assert token in allowed
            if temperature == 0:
                assert token == max(allowed, key=lambda i: logits[i])
            own, top = sampler.logprobs
            assert own == pytest.approx(expected[token], abs=1e-4)
            assert top[0] == (ID_OF[b"x"], pytest.approx(expected[ID_OF[b"x"]], abs=1e-4))
            grammar.take(token)
            if token == EOS:
                break


def test_bits():
    """The last bit of a word, which is an int32's sign, or a word too few."""
    assert bits_of([0, 31, 32, 63, 64, 99], 65).tolist() == [-(2**31) + 1, -(2**31) + 1, 1]
    assert bits_of([], 64).tolist() == [0, 0]


# --- the command line ---


def test_schema_on_the_command_line(tmp_path, capsys):
    """A schema's file read as JSON, JSON taken for a file, or a traceback for either."""
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert schema_of(str(file)) == schema_of(' {"type": "object"}').strip()
    for given, said in (
        ("{", "not JSON"),
        (str(tmp_path / "none.json"), "No such file"),
        (str(tmp_path), "directory"),
    ):
        assert main(["O", "--json-schema", given]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert main(["O", "--regex", "a", "--json-schema", "{}"]) == 2
    assert "both given" in capsys.readouterr().err


def test_a_cut_output_is_said(capsys):
    """JSON that was cut at max_tokens, and a reader who takes it for whole."""

    class Done:
        token_ids, finish_reason = [1, 2, 3], "length"

    warn_if_cut(Done)
    line = "warning: the output was cut at 3 tokens and is not complete\n"
    assert capsys.readouterr() == ("", line)
    Done.finish_reason = "stop"
    warn_if_cut(Done)
    assert capsys.readouterr() == ("", "")
