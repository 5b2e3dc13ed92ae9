"""Shared by the tests: tiny random checkpoints of both families, written once per session, and the
project on the path."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test must not depend on the network
# torch keeps compiled kernels by their source, and would load those of a run with other instructions
kernels = f"torchinductor-{os.getuid()}-{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), kernels))
if not any("gpu.py" in argument or argument == "gpu" for argument in sys.argv):
    # Tests expect the numbers of a CPU, and start more ranks than there may be GPUs: only what is
    # named sees them, as by `pytest tests/test_gpu.py`, `pytest tests -k gpu` or the benchmark
    # gpu.py.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would the processes
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLERS = {
    number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
}

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes seconds; `bash tests/run.sh all` runs it")


def marked(cases, daily=1) -> list:
    """Cases of a parametrized test, of which those that are not ``daily`` run in `all` only. A number:
    so many of the first."""
    cases = list(cases)
    daily = cases[:daily] if isinstance(daily, int) else daily
    return [
        case
        if case in daily
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]


@pytest.fixture(autouse=True)
def signal_handlers():
    """A whole run may replace them; the test process wants its own back."""
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def programs_of_other_tests(monkeypatch):
    """Each test starts those that it names, and none of them outlives it but those of a whole file."""
    from common import user_code

    monkeypatch.setattr(user_code, "programs", {})
    before = set(user_code.remotes)
    yield
    for remote in set(user_code.remotes) - before:
        remote.end()


def write_checkpoint(
    folder: Path, kind: str, tie: bool = False, shard_size: str = "5GB", spare_ids: int = 0, **size
) -> Path:
    """A random checkpoint whose weights are large enough that attention is not uniform and
    positions matter; with some ids more than its tokenizer has, of two layers or another ``size``
    than the toy's."""
    from launch import toy

    tokenizer = toy.make_tokenizer()
    model = toy.make_model(kind, tokenizer, seed=0, **{"layers": 2} | size)
    if spare_ids:
        model.resize_token_embeddings(len(tokenizer) + spare_ids)
    if tie:
        model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
        model.tie_weights()
    generator = seeded(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5
                )
            # as they are made, states would be forgotten within a token or two
            elif name.endswith("A_log"):
                parameter.uniform_(0.005, 0.3, generator=generator).log_()
            elif "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    toy.make_image_processor(kind).save_pretrained(folder)
    return folder


SLOWEST = (
    "test_checkpoint.py",
    "test_slurm.py",
    "test_real.py",
    "test_training.py",
    "test_families.py",
    "test_experiments.py",
    "test_smoke.py",
    "test_gpu.py",
    "test_teams.py",
    "test_environments.py",
    "test_benchmarks.py",
)


def pytest_collection_modifyitems(items):
    """The longest files first, so that both processes are busy to the end."""
    items.sort(
        key=lambda item: (
            SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST)
        )
    )


def rounding(additions: int) -> float:
    """Bound of the relative error of sums in float32 whose order is free: each of so many additions
    rounds by at most epsilon / 2, in both orders. Where all of a path can be computed in float64, a
    test does that instead."""
    return additions * torch.finfo(torch.float32).eps


Tensors = dict[str, torch.Tensor]  # by name
# in float32, of the tiny models: their matrix products sum up to 128 terms
ROUNDING = rounding(128)


def our_name(name: str) -> str:
    """A parameter of transformers' model, as ours calls it."""
    for moved in ("A_log", "dt_bias"):
        name = name.replace(f".{moved}", f".decay.{moved}")
    return name


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_5"])
def checkpoint(request, tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def qwen25(tmp_path_factory) -> Path:
    """Of one layer, for whole runs."""
    return write_checkpoint(tmp_path_factory.mktemp("qwen25"), "qwen2_5_vl", layers=1)


def words(*parts: str | Path) -> list[str]:
    """The words of a command line. A part that begins with -- may hold several flags, and values
    without spaces."""
    line = []
    for part in map(str, parts):
        line += part.split() if part.startswith("--") else [part]
    return line


def start(checkpoint: Path, data: str | None = None, *flags: str | Path):
    """The script's own start-up in this process, as one rank: flags, rows, processor, models."""
    from types import SimpleNamespace

    import train_ppo_vl as ppo
    from common import distributed

    common = "--max_prompt_tokens 512 --max_new_tokens 12 --prompts_per_step 4"
    args = ppo.parse_args(words("--model", checkpoint, "--data", data, common, "--", *flags))
    ranks = distributed.start(args.timeout, args.hsdp, args.rollout_shards)
    rows = ppo.load_rows(args)
    models = ppo.build_models(args, rows.processor, ranks.device)
    ppo.check_teacher_rows(args, rows, models.teacher)
    ppo.load_models(args, models.by_role(), ranks)
    return SimpleNamespace(
        args=args,
        ranks=ranks,
        rows=rows,
        processor=rows.processor,
        prompts=rows.train,
        sampling=ppo.sampling_of(args, rows.processor, ranks.device, models.teacher),
        models=models,
        actor=models.actor,
        critic=models.critic,
        reference=models.reference,
    )


def build_rewards(args, reward, rows, actor, ranks) -> None:
    """Build and load the reward models of a run, as its start does."""
    import train_ppo_vl as ppo
    from common import distributed
    from common.model import weights

    models = ppo.reward_modules(args, reward, rows, actor)
    with distributed.raise_on_all_ranks():
        for module in models.values():
            ppo.shard(module, ranks.mesh)
            weights.fill(module, ranks.device, args.seed)


def judge_settings(*verdicts: tuple[str, str], saved: dict = {}, **settings):
    """Settings of a judge that is trained on (kind, verdict), from a checkpoint with ``saved`` ones."""
    from types import SimpleNamespace

    from common.rewards.judgements import JudgeSettings

    judge = JudgeSettings.to_train(SimpleNamespace(files={"judge": saved}), **settings)
    judge.note_training(
        SimpleNamespace(label=kind, reference=verdict, row={}) for kind, verdict in verdicts
    )
    return judge


def write_judge(folder: Path, *verdicts: tuple[str, str], **settings) -> None:
    """Make a checkpoint one of a judge that was trained on (kind, verdict)."""
    write_json(folder / "judge.json", vars(judge_settings(*verdicts, **settings)))


def take(env, count: int | None = None):
    """The first prompts of the file as one batch without samples, pictures decoded."""
    from common.data.loader import PromptLoader

    rows = env.prompts[:count]
    with PromptLoader(env.processor, env.args) as loader:
        return loader.collect(*loader.submit(rows, list(range(len(rows)))))


def with_flags(args, **changes):
    """The same arguments with other values of some flags."""
    from common import flags

    return flags.override(args, changes)


def user_error(message: str):
    """One message of a user's error, which this pattern is found in."""
    from common.ground import process

    return pytest.raises(process.UserError, match=message)


def value_error(message: str):
    """The same of what is no run: a file, a row, a function."""
    return pytest.raises(ValueError, match=message)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value))


def table(text: str) -> list[list[str]]:
    """The rows of a text whose columns stand between bars; a line indented by 4 continues a row."""
    rows = re.sub(r"\n {4}(?! )", " ", text.strip("\n")).splitlines()
    return [re.split(r" +\| *", row) for row in rows]


def readme_reward() -> str:
    """The program of the README, my_reward.py."""
    return (
        (ROOT / "README.md")
        .read_text()
        .partition("# my_reward.py")[2]
        .partition("\n")[2]
        .partition("```")[0]
    )


def write_rows(path: Path, rows: list[dict]) -> str:
    """Write a JSONL file; its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(out: Path) -> list[dict]:
    """The records of a run's metrics, without the one of its start."""
    return [record for record in read_rows(out / "metrics.jsonl") if "step" in record]


def reproducible(record: dict) -> dict:
    """All but times and memory."""
    return {
        name: value
        for name, value in record.items()
        if not name.startswith("perf/") and "seconds" not in name
    }


def assert_same_records(one: list[dict], other: list[dict]) -> None:
    """In every bit, but for times and memory."""
    assert list(map(reproducible, one)) == list(map(reproducible, other))


def same_tensors(one: Tensors, other: Tensors) -> bool:
    """Whether names and values are the same in every bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """As the one file of a checkpoint."""
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def responses_of(samples) -> Iterator[tuple[int, torch.Tensor]]:
    """Index of the prompt and tokens of each sample, as `Batch.with_responses` takes them."""
    return zip(samples.prompt_index.tolist(), samples.split(samples.tokens))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(T,) of (T, V) logits."""
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def write_image(path: Path, size: tuple[int, int], rng) -> None:
    """Random pixels, drawn from a generator of numpy's; the size is (width, height)."""
    import numpy as np
    from PIL import Image

    width, height = size
    Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)


def hugging_face(folder: Path):
    """transformers' own model of a checkpoint, with attention as plain products."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")


def inputs_of(prompt, response: torch.Tensor, processor, pixels=None) -> dict:
    """What Hugging Face's own model takes of a prompt and the tokens of one response, unpacked;
    ``pixels``: patches of other images than the prompt's own, of the same sizes."""
    from common.data.loader import load_pixels

    ids = torch.cat([prompt.input_ids, response])[None]
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == processor.config.image_token_id).int()}
    if pixels is None:
        pixels = load_pixels(prompt, processor)
    if pixels is not None:
        inputs |= {"pixel_values": pixels, "image_grid_thw": prompt.patch_grids}
    return inputs


def logits_of(model, prompt, response: torch.Tensor, processor, pixels=None) -> torch.Tensor:
    """(T, V) of Hugging Face's own model, for the T tokens of one response; -inf: banned."""
    logits = model(**inputs_of(prompt, response, processor, pixels)).logits[
        0, len(prompt.input_ids) - 1 : -1
    ]
    return logits.index_fill(1, torch.tensor(sorted(processor.banned_ids)), -torch.inf)


def keep_activations(model) -> None:
    """Undo `common.model.weights.recompute_layers`."""
    from common.model.vlm import trained_parts

    for part in trained_parts(model):
        disable = getattr(
            part, "activation_checkpointing_disable", part.gradient_checkpointing_disable
        )
        disable()


@contextmanager
def computing(module, apart=False, **changes):
    """Inside, a model computes in another way: other packs, another chunk of its head; ``apart``:
    each response stands with a copy of its prompt."""
    import dataclasses

    from common.model import packs

    setup, make_blocks = module.model.setup, packs.make_blocks
    module.model.setup = dataclasses.replace(setup, **changes)
    if apart:
        packs.make_blocks = lambda batch, max_tokens, groups, score_cost: make_blocks(
            batch, 0, groups
        )
    try:
        yield
    finally:
        module.model.setup, packs.make_blocks = setup, make_blocks


@pytest.fixture(scope="session")
def picture_rows(tmp_path_factory) -> str:
    """A JSONL file: prompts with 0, 1, 2 and 1 images of different sizes."""
    import numpy as np

    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    rows = []
    for i, sizes in enumerate([[], [(56, 56)], [(84, 56), (56, 112)], [(112, 84)]]):
        names = [f"picture-{i}-{k}.png" for k in range(len(sizes))]
        for name, size in zip(names, sizes):
            write_image(folder / name, size, rng)
        rows.append(
            {"prompt": "how many circles are there? " * (i + 1), "images": names, "answer": "1"}
        )
    return write_rows(folder / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def write_samples():
    """Of every step; what a run of a few steps tells otherwise are those of its first."""
    from common import logging
    from helpers import samples_of_every_step

    before = logging.RunLogger.shows_samples
    samples_of_every_step()
    yield
    logging.RunLogger.shows_samples = before


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """train.jsonl (8 rows) and eval.jsonl (7): 0, 1 or 2 images each; eval-1.jsonl and
    eval-3.jsonl, the first rows of eval.jsonl; reward.py; bad.jsonl with a damaged picture."""
    import numpy as np

    from helpers import REWARD

    folder, rng = tmp_path_factory.mktemp("task"), np.random.default_rng(0)
    (folder / "reward.py").write_text(REWARD)
    sizes = [
        [],
        [(56, 56)],
        [(84, 56), (56, 112)],
        [(112, 84)],
        [],
        [(56, 28), (28, 56)],
        [(28, 28)],
        [(84, 84)],
    ]
    for name, count in (("train", 8), ("eval", 7)):
        rows = []
        for i in range(count):
            images = [f"{name}-{i}-{k}.png" for k in range(len(sizes[i]))]
            for image, size in zip(images, sizes[i]):
                write_image(folder / image, size, rng)
            question = f"row {i}: " + "how many circles are there? " * (i % 3 + 1)
            rows.append({"prompt": question, "images": images, "answer": "1"})
        write_rows(folder / f"{name}.jsonl", rows)
    for count in (1, 3):
        write_rows(folder / f"eval-{count}.jsonl", rows[:count])
    whole = (folder / "train-3-0.png").read_bytes()
    # the header is there, the body is not
    (folder / "damaged.png").write_bytes(whole[: len(whole) // 2])
    rows = [
        {"prompt": f"row {i}", "images": ["damaged.png"] if i == 1 else [], "answer": "1"}
        for i in range(4)
    ]
    write_rows(folder / "bad.jsonl", rows)
    return folder


def published(source: Path, folder: Path, kind: type, text: dict, vision: dict) -> Path:
    """A published config.json of a ``kind``, but for the token ids, beside the other files of a toy's
    checkpoint; no weights."""

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    small = read_json(source / "config.json")
    ids = {name: value for name, value in small.items() if name.endswith("token_id")}
    text = {"tie_word_embeddings": False} | text
    config = kind(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def seven_b(qwen25, tmp_path_factory) -> Path:
    """Qwen2.5-VL-7B-Instruct."""
    from transformers import Qwen2_5_VLConfig

    text = dict(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    )
    vision = dict(
        depth=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        out_hidden_size=3584,
        patch_size=14,
        spatial_merge_size=2,
        window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31],
    )
    folder = tmp_path_factory.mktemp("7b") / "model"
    return published(qwen25, folder, Qwen2_5_VLConfig, text, vision)


@pytest.fixture
def poll(monkeypatch) -> list[int]:
    """[after how many tokens the engine looks at its samples]"""
    from common.rollout import RolloutEngine

    poll, init = [1], RolloutEngine.__init__

    def init_with_poll(engine, *args):
        init(engine, *args)
        engine.poll = poll[0]

    monkeypatch.setattr(RolloutEngine, "__init__", init_with_poll)
    return poll


@pytest.fixture
def graphs_of(monkeypatch):
    """A function that lets rollouts use graphs where a GPU would, with a replay that runs the step
    again; ``replay`` may stand in for it: (step, size, capacity) -> None. Returns the list of
    captured batch sizes and capacities."""
    from types import SimpleNamespace

    from common.model import graphs
    from common.rollout import RolloutEngine

    init = RolloutEngine.__init__

    def use(replay=lambda step, size, capacity: step(size, capacity)):
        captured = []

        def init_with_graphs(engine, *args):
            init(engine, *args)
            engine.graphs = graphs.StepGraphs(1)

        def capture(step, size, capacity, pool):
            engine = step.__self__

            def addresses():
                tensors = [*engine.state, *engine.cache.keys, *engine.cache.values]
                if engine.cache.linear is not None:
                    tensors += [engine.cache.linear.inputs, engine.cache.linear.states]
                return [tensor.data_ptr() for tensor in tensors]

            seen = addresses()
            captured.append((size, capacity))

            def replay_at_the_same_addresses():
                assert addresses() == seen
                # or a slot sees none of its keys: NaN
                assert engine.length[:size].max() < capacity
                replay(step, size, capacity)

            return SimpleNamespace(replay=replay_at_the_same_addresses)

        monkeypatch.setattr(RolloutEngine, "__init__", init_with_graphs)
        monkeypatch.setattr(graphs, "capture", capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        return captured

    return use


@pytest.fixture(scope="module")
def pyarrow(tmp_path_factory):
    import extra_packages

    with extra_packages.installed("pyarrow", "pyarrow", tmp_path_factory.mktemp("pyarrow")):
        import pyarrow.parquet

        yield pyarrow


@pytest.fixture(scope="session")
def processor(tmp_path_factory):
    """Of a checkpoint without weights."""
    from common.data.processor import Processor
    from helpers import write_processor

    return Processor(write_processor(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def load(tmp_path, processor):
    """load(rows, columns, system_prompt, env, **flags): write rows (dicts, or raw bytes) as train.jsonl
    beside two pictures and load them."""
    from PIL import Image

    from common.data.rows import load_prompts, parse_columns
    from common.flags import DataArgs
    from helpers import BLUE, RED

    Image.new("RGB", (64, 40), RED).save(tmp_path / "a.png")
    Image.new("RGB", (30, 90), BLUE).save(tmp_path / "b.jpg")

    def load(rows, columns="", system_prompt="", env="", **flags):
        data = (
            rows
            if isinstance(rows, bytes)
            else "".join(json.dumps(row) + "\n" for row in rows).encode()
        )
        (tmp_path / "train.jsonl").write_bytes(data)
        args = DataArgs(**{"max_prompt_tokens": 500} | flags)
        how = processor, args, parse_columns(columns), system_prompt, env
        return load_prompts(str(tmp_path / "train.jsonl"), *how)

    return load


@pytest.fixture(scope="module")
def judges(tmp_path_factory, qwen25) -> dict[str, Path]:
    """near: the actor's tower, so no tower of its own; far: another tower; both with a judge.json."""
    from transformers import AutoModelForImageTextToText

    from common.data.processor import Processor

    folders = {"near": qwen25, "far": write_checkpoint(tmp_path_factory.mktemp("far"), "qwen3_vl")}
    result = {}
    for name, source in folders.items():
        folder = tmp_path_factory.mktemp(f"judge-{name}")
        model = AutoModelForImageTextToText.from_pretrained(source)
        # the language model differs, the tower does not
        with torch.no_grad():
            model.lm_head.weight.copy_(
                torch.randn(model.lm_head.weight.shape, generator=seeded(5)) / 4
            )
        model.save_pretrained(folder)
        Processor(source).save(str(folder))
        verdicts = [
            ("correct", "yes"),
            ("rubric", "no"),
            ("answers", "A"),
            ("score", "1"),
            ("score", "2.5"),
            ("score", "-4"),
        ]
        write_judge(folder, *verdicts, system_instruction="Judge: {prompt}")
        result[name] = folder
    return result


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """A file of pairs."""
    import numpy as np

    from judging import PAIRS

    folder = tmp_path_factory.mktemp("pairs")
    for k in range(2):
        write_image(folder / f"{k}.png", (56, 56), np.random.default_rng(k))
    return Path(write_rows(folder / "pairs.jsonl", PAIRS))


@pytest.fixture(scope="session")
def judgements(tmp_path_factory) -> Path:
    """rows.jsonl and eval.jsonl: JUDGEMENTS; more.jsonl: six rows without pictures; three pictures."""
    import numpy as np

    from helpers import JUDGEMENTS

    folder, rng = tmp_path_factory.mktemp("judgements"), np.random.default_rng(0)
    for i, size in enumerate([(56, 56), (84, 56), (56, 112)]):
        write_image(folder / f"{i}.png", size, rng)
    write_rows(folder / "rows.jsonl", JUDGEMENTS)
    write_rows(folder / "eval.jsonl", JUDGEMENTS)
    write_rows(
        folder / "more.jsonl", [{"prompt": f"say {i}", "response": str(i)} for i in range(6)]
    )
    return folder


@pytest.fixture
def kernels(monkeypatch):
    """Every back-end runs on a CPU."""
    from reference_kernels import replace_kernels

    yield from replace_kernels(monkeypatch)


@pytest.fixture(params=["gpu", "reference"])
def device(request, monkeypatch) -> torch.device:
    """A GPU; or a CPU with the reference kernels, where torch sees no GPU."""
    on_gpu = request.param == "gpu"
    if on_gpu != torch.cuda.is_available():
        pytest.skip("needs a GPU" if on_gpu else "runs on the GPU that is here")
    if on_gpu:
        return torch.device("cuda")
    request.getfixturevalue("kernels")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    return torch.device("cpu")


@pytest.fixture
def gpu(request) -> torch.device:
    """A GPU, of a test that cannot run elsewhere for the reason that is listed."""
    from reference_kernels import ONLY_ON_A_GPU

    reason = ONLY_ON_A_GPU[request.function.__name__]
    if not torch.cuda.is_available():
        pytest.skip(f"needs a GPU: {reason}")
    return torch.device("cuda")


# ----------------------------------------------------------------------------- runs that are ended and go on: lives.py
@pytest.fixture(scope="session")
def life_task(tmp_path_factory) -> Path:
    """The rows and the reward of these runs."""
    from lives import write_task

    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def flags(qwen25, life_task):
    """flags(out, "--more flags"): of a run of two steps."""
    from lives import flags_of

    return flags_of(qwen25, life_task)


@pytest.fixture(scope="session")
def undisturbed(flags, tmp_path_factory):
    """undisturbed("gae", ranks): the folder of a run of four steps that nothing happened to."""
    from lives import undisturbed_runs

    return undisturbed_runs(flags, tmp_path_factory)


@pytest.fixture(scope="session")
def finished(flags, tmp_path_factory) -> Path:
    """A run of two steps with the checkpoints step-1 and step-2; copy it before use."""
    import train_ppo_vl

    out = tmp_path_factory.mktemp("finished") / "run"
    train_ppo_vl.main(flags(out))
    return out


@pytest.fixture
def out(tmp_path) -> Path:
    """Where a run goes."""
    return tmp_path / "run"


@pytest.fixture
def copy(finished, out) -> Path:
    return Path(shutil.copytree(finished, out, symlinks=True))
