"""LLM's door: what opens, what is refused and how, and several callers at once."""

import json
import multiprocessing
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TINY, random_tensors, save_bf16, write_checkpoint
from safetensors.numpy import save_file

from engine import LLM, SamplingParams
from engine.llm import BUILT_IN

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def built_in() -> LLM:
    return LLM()


def refused(*args, **kwargs) -> str:
    """The one line with which LLM refuses."""
    with pytest.raises(ValueError) as e:
        LLM(*args, **kwargs)
    assert "\n" not in str(e.value)
    return str(e.value)


# ---------------------------------------------------------------- checkpoints


def test_tied_head_may_be_absent_or_present(tmp_path):
    """A tied file without lm_head.weight is what the hub ships; one with it must open as well."""
    tensors = random_tensors(TINY)
    without = LLM(write_checkpoint(tmp_path / "a", tensors)).logits([1, 2, 3])
    tensors[HEAD] = tensors[EMBEDDING].copy()
    carried = LLM(write_checkpoint(tmp_path / "b", tensors))
    np.testing.assert_array_equal(carried.logits([1, 2, 3]), without)
    weights = carried._model.weights
    assert weights.head is weights.embedding, "the tied matrix must not be held twice"


def test_untied_head_is_used(tmp_path):
    """An untied model that reads its embedding as head gives fluent nonsense."""
    raw = TINY | {"tie_word_embeddings": False}
    path = write_checkpoint(tmp_path, random_tensors(raw), tie_word_embeddings=False)
    model = LLM(path)
    assert model._model.weights.head is not model._model.weights.embedding


@pytest.mark.parametrize("name", [HEAD, Q])
def test_missing_tensor_is_named(name, tmp_path):
    """A missing tensor found out in the forward pass gives an obscure error."""
    raw = TINY | {"tie_word_embeddings": False}
    tensors = random_tensors(raw)
    del tensors[name]
    told = refused(write_checkpoint(tmp_path, tensors, tie_word_embeddings=False))
    assert name in told and "missing" in told and "model.safetensors" in told


def test_left_over_tensor_is_named(tmp_path):
    """Tensors nobody reads mean that the model is another one."""
    tensors = random_tensors(TINY) | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, "f4")}
    told = refused(write_checkpoint(tmp_path, tensors))
    assert "q_proj.bias" in told and "left over" in told


def test_mis_shaped_tensor_is_named_with_both_shapes(tmp_path):
    """A transposed matrix has the right number of weights."""
    tensors = random_tensors(TINY)
    tensors[Q] = np.ascontiguousarray(tensors[Q].T)
    told = refused(write_checkpoint(tmp_path, tensors))
    assert Q in told and "(32, 64)" in told and "(64, 32)" in told


@pytest.mark.parametrize("name", [EMBEDDING, Q, "model.layers.1.self_attn.k_norm.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_weight_that_is_not_finite_is_named(name, value, weights, tmp_path):
    """One NaN makes every logit NaN, and the argmax of NaNs is a token."""
    tensors = random_tensors(TINY)
    tensors[name].flat[-1] = value
    told = refused(write_checkpoint(tmp_path, tensors), weights=weights)
    assert name in told and "not finite" in told


def test_every_stored_type_opens_alike(tmp_path):
    """F32, F16 and BF16 files of the same values are the same model."""
    raw = {n: a.astype(np.float16).astype(np.float32) for n, a in random_tensors(TINY).items()}
    both = {n: (a.view(np.uint32) & 0xFFFF0000).view(np.float32) for n, a in raw.items()}
    found = []
    for kind in ("F32", "F16", "BF16"):
        path = write_checkpoint(tmp_path / kind, both)
        if kind == "F16":
            half = {n: a.astype(np.float16) for n, a in both.items()}
            save_file(half, path / "model.safetensors")
        if kind == "BF16":
            save_bf16(both, path / "model.safetensors")
        found.append(LLM(path, weights="f32").logits([5, 6, 7]))
        found.append(LLM(path, weights="bf16").logits([5, 6, 7]))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-4)


def test_shards_open_as_one(tmp_path):
    """Larger models come in several files with an index."""
    tensors = random_tensors(TINY)
    whole = LLM(write_checkpoint(tmp_path / "a", tensors)).logits([1, 2])
    path = write_checkpoint(tmp_path / "b", tensors)
    (path / "model.safetensors").unlink()
    names, placed = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        placed |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    np.testing.assert_array_equal(LLM(path).logits([1, 2]), whole)


def test_unknown_rope_scaling_is_named(tmp_path):
    """A scaling silently ignored is wrong at every position."""
    scaling = {"rope_type": "yarn", "factor": 4.0}
    path = write_checkpoint(tmp_path, random_tensors(TINY), rope_scaling=scaling)
    assert "yarn" in refused(path)


def test_tokenizer_larger_than_the_embedding(tmp_path, built_in):
    """Ids beyond the embedding would read whatever lies behind it."""
    path = write_checkpoint(tmp_path)  # 300 rows
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((BUILT_IN / name).read_bytes())
    told = refused(path)
    assert "2048" in told and "300" in told


def test_no_tokenizer_still_serves_ids(tmp_path):
    """A checkpoint of weights alone is enough for a program that speaks ids."""
    llm = LLM(write_checkpoint(tmp_path))
    done = llm.generate([1, 2, 3], GREEDY)
    assert len(done.token_ids) == 8 and done.text is None
    for call in (lambda: llm.generate("text"), lambda: llm.stream([1])):
        with pytest.raises(ValueError, match="tokenizer"):
            call()


# ---------------------------------------------------------------- arguments and prompts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "q3"),
        ("weights", []),
        ("kv_cache", {}),
        ("kv_cache", "fast"),
        ("backend", "gpu"),
        ("threads", 0),
        ("threads", -1),
        ("threads", 10**9),
        ("threads", 1.5),
        ("threads", True),
        ("context", 0),
        ("context", 4096),
        ("context", "8"),
        ("prefill_chunk", 0),
        ("prefill_chunk", None),
    ],
)
def test_bad_arguments_are_refused_with_the_value(name, value):
    """A wrong option must not become a default, and must not reach a kernel."""
    told = refused(**{name: value})
    assert name in told and repr(value) in told


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_empty_prompt(prompt, built_in):
    """There is no last token whose logits could be asked for."""
    with pytest.raises(ValueError, match="empty"):
        built_in.generate(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        1.5,
        b"bytes",
        bytearray(b"a"),
        {1: 2},
        {1, 2},
        ["a", 1],
        [[1], [[2]]],
        np.array(5),
        np.zeros((2, 2), int),
    ],
    ids=repr,
)
def test_prompt_of_another_kind(prompt, built_in):
    """What is neither text nor ids gets an error that says so, not a traceback from inside."""
    with pytest.raises(ValueError, match="prompt|token id"):
        built_in.generate(prompt)


def test_several_prompts_or_params_where_one_is_needed(built_in):
    """A list of texts to stream is told of as a token id, and of params as a page of fields."""
    with pytest.raises(ValueError, match=r"\['a', 'b'\]; one text or a list of token ids"):
        built_in.stream(["a", "b"])
    with pytest.raises(ValueError, match="one SamplingParams is needed") as e:
        built_in.generate(["a", "b"], [SamplingParams(), SamplingParams()])
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("token", [-1, 2176, 1 << 40, 1.5, "a", None, True])
def test_token_outside_the_vocabulary(token, built_in):
    """An id beyond the embedding reads memory that is not a row."""
    with pytest.raises(ValueError, match="token id"):
        built_in.logits([1, token])
    with pytest.raises(ValueError):
        built_in.generate([1, token])


@pytest.mark.parametrize("length", [15, 16, 17])
@pytest.mark.parametrize("max_tokens", [1, 2, None])
def test_prompt_and_context(length, max_tokens):
    """A prompt that fills the context leaves no room; one token less leaves room for one."""
    llm = LLM(context=16)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    if length < 16:
        done = llm.generate([5] * length, params)
        assert (len(done.token_ids), done.finish_reason) == (1, "length")
    else:
        with pytest.raises(ValueError, match=rf"{length} tokens.*16"):
            llm.generate([5] * length, params)


def test_a_bad_prompt_among_many_is_found_before_any_work(built_in, monkeypatch):
    """The answers to the prompts before it would be computed and lost."""
    monkeypatch.setattr(built_in._model, "forward", None)
    with pytest.raises(ValueError, match="empty"):
        built_in.generate(["To be", ""])
    with pytest.raises(ValueError, match="2048 tokens long, the context 2048"):
        built_in.generate(["To be", [5] * 2048])
    with pytest.raises(ValueError, match="SamplingParams"):
        built_in.generate(["To be"], {"max_tokens": 3})


@pytest.mark.parametrize("params", [{}, 0, {"max_tokens": 3}, SamplingParams])
def test_params_of_another_kind(params, built_in):
    """A dict taken for defaults, or an AttributeError from deep inside."""
    with pytest.raises(ValueError, match="SamplingParams"):
        built_in.generate("To be", params)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_that_overflow(name, tmp_path):
    """Logits of NaN, whose argmax is token 0 for ever."""
    tensors = random_tensors(TINY)
    tensors[name][:] = 3e38
    llm = LLM(write_checkpoint(tmp_path, tensors), weights="f32")
    for params in (GREEDY, SamplingParams(seed=1)):
        with pytest.raises(ValueError, match="not finite"):
            llm.generate([1, 2], params)
    with pytest.raises(ValueError, match="not finite"):
        llm.logits([1, 2])


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
@pytest.mark.parametrize("kv_cache", ["basic", "paged"])
def test_keys_that_overflow(kv_cache, kv_dtype, tmp_path):
    """A softmax that makes numbers of NaN: fluent nonsense, where float16 holds no such key."""
    tensors = random_tensors(TINY)
    for name in tensors:
        if "k_norm" in name or ("q_norm" in name and kv_dtype == "f32"):
            tensors[name] *= np.float32(1e6 if kv_dtype == "f16" else 1e30)
    path = write_checkpoint(tmp_path, tensors)
    llm = LLM(path, weights="f32", kv_cache=kv_cache, kv_dtype=kv_dtype)
    for ask in (lambda: llm.logits(range(20)), lambda: llm.generate(range(20), GREEDY)):
        with pytest.raises(ValueError, match="not finite"):
            ask()


def test_a_pool_too_small_is_said_before_any_work(tmp_path, monkeypatch):
    """A request that fails half-way, its prompt computed for nothing and its text cut.

    33 rows hold 30 tokens and 4 to follow, of which the last needs none.
    """
    llm = LLM(write_checkpoint(tmp_path), kv_cache="paged", kv_block_rows=3, kv_max_blocks=11)
    done = llm.generate(range(30), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert len(done.token_ids) == 4
    whole = llm.generate(range(30), SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(whole.token_ids), whole.finish_reason) == (4, "length"), "as many as there is room"
    monkeypatch.setattr(llm._model, "forward", None)
    with pytest.raises(
        ValueError, match=r"30 tokens and 5 to follow .* 33 rows \(11 blocks of 3\)"
    ):
        llm.generate(range(30), SamplingParams(max_tokens=5))
    for max_tokens in (1, None):
        with pytest.raises(ValueError, match="35 tokens and 1 to follow"):
            llm.generate(range(35), SamplingParams(max_tokens=max_tokens))


@pytest.fixture
def chatty(tmp_path) -> Path:
    """The built-in model with a chat template."""
    shutil.copytree(BUILT_IN, tmp_path / "m", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "m" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant{{ mark or '' }}:{% endif %}"
    )
    return tmp_path / "m"


def test_chat(chatty):
    """A template left out, its arguments lost, or a conversation computed anew at every turn."""
    llm, session = LLM(chatty), None
    messages = [{"role": "user", "content": "To be?"}]
    first = llm.chat(messages, GREEDY, session := llm.new_session())
    assert first.text == llm.generate("user: To be?\nassistant:", GREEDY).text
    marked = llm.chat(messages, GREEDY, mark="!")
    assert marked.token_ids == llm.generate("user: To be?\nassistant!:", GREEDY).token_ids
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
    second = llm.chat(messages, GREEDY, session)
    assert second.metrics.cached_tokens >= first.metrics.prompt_tokens
    assert second.token_ids == llm.chat(messages, GREEDY).token_ids
    assert "".join(llm.stream_chat(messages, GREEDY)) == second.text


def test_chat_without_a_template(built_in, tmp_path):
    """A conversation joined somehow, in a form that the model has never seen."""
    with pytest.raises(ValueError, match="no chat template"):
        built_in.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(ValueError, match="no tokenizer.json"):
        LLM(write_checkpoint(tmp_path)).chat([{"role": "user", "content": "Hi"}])


def test_defaults_are_the_models(tmp_path):
    """A model sampled otherwise than its makers say: loops at temperature 0, nonsense at 1."""
    path = write_checkpoint(tmp_path)
    assert LLM(path).default_params == SamplingParams()
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1, "min_p": None}
    (path / "generation_config.json").write_text(json.dumps(own))
    llm = LLM(path)
    assert llm.default_params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert llm._start([1], None).params.top_k == 20
    assert llm._start([1], SamplingParams(seed=1)).params == SamplingParams(seed=1)
    (path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ValueError, match="generation_config.json: temperature is -1"):
        LLM(path)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache": "concat", "kv_dtype": "f16"},
        {"kv_dtype": "q8_0"},
        {"kv_block_rows": 0},
        {"kv_block_rows": 16.0},
        {"kv_cache": "paged", "kv_max_blocks": 0},
        {"kv_cache": "paged", "kv_max_blocks": "9"},
    ],
    ids=str,
)
def test_settings_of_a_cache_that_cannot_be(settings):
    """A setting that is ignored, or fails with a traceback from deep inside."""
    (name, value) = list(settings.items())[-1]
    with pytest.raises(ValueError, match=rf"{name} is {value!r}"):
        LLM(**settings)


def test_what_is_asked_and_cannot_be_given(tmp_path):
    """Samples or stop strings that are silently left out."""
    llm = LLM(write_checkpoint(tmp_path))
    with pytest.raises(ValueError, match="2 completions cannot share a session"):
        llm.generate([1], SamplingParams(n=2), llm.new_session())
    with pytest.raises(ValueError, match="profile is of one completion; n is 2"):
        llm.generate([1], SamplingParams(n=2), profile=True)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))


def test_an_llm_and_its_metrics_say_what_they_are(built_in):
    """<engine.llm.LLM object at 0x...> in a notebook."""
    assert "model='built-in'" in repr(built_in) and "weights='q8_0'" in repr(built_in)
    assert "per_forward_ms=[" in repr(built_in.generate("To be", GREEDY).metrics)


def test_no_tokens_wanted(built_in):
    """max_tokens=0 is a legal question with an empty answer."""
    done = built_in.generate("To be", SamplingParams(max_tokens=0))
    assert (done.token_ids, done.text, done.finish_reason) == ([], "", "length")
    assert done.metrics.decode_tokens_per_second is None


def test_lists_of_prompts(built_in):
    """A list of ids is one prompt, a list of lists or texts is many."""
    one = built_in.generate("To be", GREEDY)
    ids = built_in.tokenizer.encode("To be")
    many = built_in.generate(["To be", ids, np.array(ids)], GREEDY)
    assert [done.token_ids for done in many] == [one.token_ids] * 3


def test_text_is_the_pieces_joined(built_in):
    """Text assembled apart from what was streamed can differ from it."""
    params = SamplingParams(max_tokens=60, seed=4)
    pieces = list(built_in.stream("O, ", params))
    done = built_in.generate("O, ", params)
    assert "".join(pieces) == done.text == built_in.tokenizer.decode(done.token_ids)


def test_a_seed_gives_the_same_text_whatever_else_runs(built_in):
    """One generator for all requests makes a seeded one depend on its neighbours."""
    params = SamplingParams(max_tokens=30, seed=42)
    alone = built_in.generate("My lord", params).token_ids
    built_in.generate("My lord", SamplingParams(max_tokens=5))
    seeded, other = built_in.stream("My lord", params), built_in.stream("My lord")
    for _ in zip(seeded, other, strict=False):
        pass
    assert seeded.completion.token_ids[:10] == alone[:10]
    assert built_in.generate("My lord", params).token_ids == alone


# ---------------------------------------------------------------- several callers


def test_threads_may_share_a_model(built_in):
    """Two callers in one team or one scratch would compute each other's tokens."""
    prompts = ["To be", "What is thy name?", "O, ", "My lord, the queen"]
    alone = [built_in.generate(prompt, GREEDY).token_ids for prompt in prompts]
    found = {}

    def call(prompt: str) -> None:
        found[prompt] = [built_in.generate(prompt, GREEDY).token_ids for _ in range(5)]

    callers = [threading.Thread(target=call, args=(prompt,)) for prompt in prompts]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    for prompt, ids in zip(prompts, alone, strict=True):
        assert found[prompt] == [ids] * 5


def generate_in_child(llm: LLM, out) -> None:
    out.put(llm.generate("To be", GREEDY).token_ids)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_generates():
    """The threads of a team do not survive a fork: the child would wait for them for ever."""
    llm = LLM(threads=2)
    wanted = llm.generate("To be", GREEDY).token_ids
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    child = context.Process(target=generate_in_child, args=(llm, out))
    child.start()
    assert out.get(timeout=30) == wanted
    child.join(timeout=30)
    assert child.exitcode == 0
