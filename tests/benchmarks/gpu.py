"""What a GPU makes of this code, against what it could: one command, random weights of the real
sizes, under 8 minutes.

    python tests/benchmarks/gpu.py                  3B and 7B; with 80 GB everything fits but a few cells of the decode table
    python tests/benchmarks/gpu.py --short          fewer sizes, batches and contexts: three minutes
    python tests/benchmarks/gpu.py --levers 3b|7b   what each lever of an update gives: two minutes
    python tests/benchmarks/gpu.py --tiny           on a toy, also on a CPU: shows that it runs, not how fast

Tables: (1) attention back-ends: errors against softmax in float64; (2) decoding steps of
Qwen2.5-VL: eager, CUDA graphs and Hugging Face `generate` (SDPA, dynamic cache) against the bound
of the memory, (weight bytes + batch x context x KV bytes) / bandwidth; (3) prefill; (4) updates
with AdamW, prompts shared and not: 3B with all weights and all layers recomputed, 7B with LoRA and
what `--gradient_checkpointing auto` chooses; (5) a whole PPO step by stage; (6) the kernels that take most
time of a decoding step and of an update. Bandwidth and, on an unknown GPU, peak FLOP/s are measured
by a copy and a product. The levers are those of updates of 3B with all weights, and of 7B with LoRA: what is
recomputed and what is kept, and what updates cost without the kernels that we fuse."""

import argparse
import dataclasses
import functools
import gc
import json
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from PIL import Image
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import reference_kernels
import train_ppo_vl as ppo
from common import distributed
from common.buffers import Batch, Pack
from common.data.processor import Processor
from common.flags import DataArgs
from common.memory import budget, memory
from common.memory.recompute import recompute
from common.model import adapters, build, layers, vlm, weights
from common.model.attention import BACKENDS, PackedAttention, SlotCache
from common.model.fsdp import Trainable, unwrapped_forward
from common.model.vlm import UpdateSetting
from common.rollout import RolloutEngine, Sample
from conftest import computing
from launch import toy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
SIZES = {  # text settings of the published checkpoints, whether input and output embeddings are one
    "tiny": ({}, False),
    "3b": (
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        True,
    ),
    "7b": (
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        False,
    ),
}


def timed(program, repeats: int = 1) -> float:
    """Seconds per call on the device."""
    synchronize = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        program()
    synchronize()
    return (time.perf_counter() - start) / repeats


def release() -> None:
    """Give back the memory of what is no longer used: cached, it would count as taken."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def limits(dtype: torch.dtype, tiny: bool) -> tuple[float, float]:
    """Bytes/s of the memory and FLOP/s of matrix products; both are printed."""
    source = torch.zeros(2**26 if tiny else 2**31, dtype=torch.uint8, device=DEVICE)
    target = source.clone()
    bandwidth = 2 * len(source) / min(timed(lambda: target.copy_(source)) for _ in range(5))
    square = torch.randn(512 if tiny else 8192, 512 if tiny else 8192, device=DEVICE, dtype=dtype)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    known = next((flops for gpu, flops in memory.PEAK_FLOPS.items() if gpu in name), None)
    peak = known or 2 * len(square) ** 3 / min(timed(lambda: square @ square) for _ in range(5))
    print(
        f"{name}, torch {torch.__version__}: {bandwidth / 1e9:.0f} GB/s (measured), "
        f"{peak / 1e12:.3g} TFLOP/s "
        f"({'data sheet' if known else 'measured'})"
    )
    return bandwidth, peak


def write_checkpoint(folder: Path, size: str) -> Path:
    """All files of a checkpoint but its weights, and 64 prompts with a picture each."""
    tokenizer = toy.make_tokenizer()
    config = toy.make_model("qwen2_5_vl", tokenizer, seed=0).config.to_dict()
    text, tied = SIZES[size]
    if text:
        config["text_config"] |= text | {"rope_parameters": ROPE, "max_position_embeddings": 32768}
        # of the toy's depth; made anew
        config["text_config"].pop("layer_types", None)
        config["vision_config"] |= TOWER | {"out_hidden_size": text["hidden_size"]}
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    processor, side = toy.make_image_processor("qwen2_5_vl"), 112 if size == "tiny" else 448
    processor.size = {"shortest_edge": side * side, "longest_edge": side * side}
    processor.save_pretrained(folder)
    for i in range(64):
        Image.effect_noise((side, side), 50 + i).convert("RGB").save(folder / f"{i}.png")
    rows = [
        {"prompt": "how many circles are there?", "images": [f"{i}.png"], "answer": "1"}
        for i in range(64)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@torch.no_grad()
def random_weights(model) -> None:
    """Every rank draws its own rows."""
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.normal_(0, 0.02) if parameter.ndim > 1 else local.fill_(0.5)


@torch.no_grad()
def random_fill(module, device: torch.device, seed: int) -> None:
    """In place of `weights.fill`; a value head begins at zero."""
    weights.materialize(module, device)
    random_weights(module.model)
    if hasattr(module, "value_head"):
        module.value_head.weight.zero_()


def text_model(folder: Path, setup: vlm.Setup):
    """The language model alone, without gradients, in the compute dtype."""
    model = build.build_model(text_config(folder)[0], setup, vision=False, head=True)
    adapters.freeze(model.parameters(), setup.dtype)
    weights.materialize(model, DEVICE)
    random_weights(model)
    return model.eval()


def text_config(folder: Path) -> tuple:
    """The config of a checkpoint, and that of its text model."""
    config = Processor(folder, DataArgs()).config
    return config, config.get_text_config()


def attention_table() -> None:
    print("\n| back-end | dtype | forward | dq | dk | dv | decode |\n|---|---|---|---|---|---|---|")
    for backend in filter(reference_kernels.usable, BACKENDS):
        for dtype in (torch.float32, torch.bfloat16)[backend != "sdpa" :]:
            errors = [
                *reference_kernels.packed_errors(backend, DEVICE, dtype).values(),
                reference_kernels.decode_error(backend, DEVICE, dtype),
            ]
            print(
                f"| {backend} | {str(dtype)[6:]} | "
                + " | ".join(f"{e:.1e}" for e in errors)
                + " |",
                flush=True,
            )


def decoding_seconds(
    sampling, model, batch: int, context: int, graphs: str, steps: int, profiled: str = ""
) -> float:
    """Seconds per step of the engine with ``batch`` busy slots of ``context`` tokens each;
    ``profiled``: a title."""
    sampling = dataclasses.replace(
        sampling, max_new_tokens=2 * steps + 8, slots=batch, cuda_graphs=graphs
    )
    actor = SimpleNamespace(model=model)
    prompts = SimpleNamespace(prompt_lengths=[context] * batch)
    with torch.inference_mode(), unwrapped_forward(vlm.decoder(model)):
        engine = RolloutEngine(actor, prompts, sampling, list(range(batch)), 1)
        engine.length[:], engine.rope[:], engine.done[:] = context, context, False
        engine.slots = {k: Sample((k, 0), stored=context) for k in range(batch)}
        # set up, captured
        timed(lambda: engine.decode(batch), 3)
        seconds = timed(lambda: engine.decode(batch), steps)
        if profiled:
            print_kernels(profiled, lambda: engine.decode(batch))
        return seconds


def print_kernels(title: str, program, most: int = 14) -> None:
    """Milliseconds, share and number of launches of the kernels that take most of the device's time."""
    activity = (
        torch.profiler.ProfilerActivity.CUDA
        if DEVICE.type == "cuda"
        else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as profile:
        seconds = timed(program)
    kernels = [event for event in profile.key_averages() if event.self_device_time_total]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(
        f"\nKernels of {title}: {total / 1e3:.2f} ms of {1e3 * seconds:.2f} ms, "
        f"{sum(event.count for event in kernels)} launches"
        "\n\n| kernel | ms | share | launches |\n|---|---|---|---|"
    )
    for event in kernels[:most]:
        print(
            f"| {event.key[:110].replace('|', '/')} | {event.self_device_time_total / 1e3:.2f} | "
            f"{100 * event.self_device_time_total / max(total, 1e-9):.1f} % | {event.count} |",
            flush=True,
        )


def generate_seconds(model, batch: int, context: int, steps: int) -> float:
    """Seconds per step of Hugging Face `generate`: the longer of two calls less the shorter."""
    ids = torch.randint(5, 100, (batch, context), device=DEVICE)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.zeros_like(ids).int(),
    }
    call = lambda n: model.generate(
        **inputs, do_sample=True, min_new_tokens=n, max_new_tokens=n, pad_token_id=0
    )  # noqa: E731
    with torch.no_grad():
        call(2)
        return (timed(lambda: call(2 + steps)) - timed(lambda: call(2))) / steps


def plain_sampling(text) -> ppo.Sampling:
    """Of any token, without an end."""
    nothing = torch.zeros(text.vocab_size, dtype=torch.bool, device=DEVICE)
    no_ids = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    return ppo.Sampling(max_new_tokens=1, banned=nothing, stop_ids=no_ids)


def decode_kernels(setup, folder: Path, size: str, batch: int, context: int) -> None:
    model, (_, text) = text_model(folder, setup), text_config(folder)
    title = f"a decoding step, {size}, {batch} x {context}, eager"
    decoding_seconds(plain_sampling(text), model, batch, context, "off", 4, title)


def decode_table(
    setup, folder: Path, size: str, batches, contexts, steps: int, bandwidth: float
) -> None:
    model, (_, text) = text_model(folder, setup), text_config(folder)
    layers = sum(p.numel() for p in model.model.language_model.layers.parameters())
    bytes_read = setup.dtype.itemsize * (layers + model.lm_head.weight.numel())
    per_token = SlotCache(text, 1, 1, setup.dtype, torch.device("meta"), setup.backend).nbytes
    sampling = plain_sampling(text)
    print(
        f"\nDecoding, {size}, {setup.backend}: weights {bytes_read / 1e9:.2f} GB, "
        f"{per_token / 1e3:.1f} kB per cached token; "
        "bound in ms; ms per step, tokens/s, per cent of the bound\n"
    )
    print("| batch x context | bound | eager | graphs | generate |\n|---|---|---|---|---|")
    free = torch.cuda.mem_get_info()[0] if DEVICE.type == "cuda" else 8e9
    for context in contexts:
        for batch in batches:
            bound, cells = (bytes_read + batch * context * per_token) / bandwidth, []
            for mode in ("off", "on", "generate"):
                if mode == "on" and DEVICE.type != "cuda":
                    cells.append("needs a GPU")
                elif batch * (context + 64) * per_token > 0.85 * free or (
                    mode == "generate" and batch * context > 2**16
                ):
                    # generate also prefills: the activations of 2^16 tokens and more
                    cells.append("too large")
                else:
                    if mode == "generate":
                        model.config.text_config._attn_implementation = "sdpa"
                        model.model.language_model.config._attn_implementation = "sdpa"
                        seconds = generate_seconds(model, batch, context, steps)
                        build.use_attention(model, setup.backend)
                    else:
                        seconds = decoding_seconds(sampling, model, batch, context, mode, steps)
                    cells.append(
                        f"{1e3 * seconds:.2f} ms, {batch / seconds:.0f}, {100 * bound / seconds:.0f} %"
                    )
                release()
            print(
                f"| {batch} x {context} | {1e3 * bound:.2f} | " + " | ".join(cells) + " |",
                flush=True,
            )


def prefill_table(setup, folder: Path, size: str, totals, peak: float) -> None:
    model, (_, text) = text_model(folder, setup), text_config(folder)
    layers = sum(p.numel() for p in model.model.language_model.layers.parameters())
    print(
        f"\nPrefill, {size}, prompts of 1,024 tokens\n\n| tokens | ms | tokens/s | MFU |\n|---|---|---|---|"
    )
    for total in totals:
        length = min(1024, total)
        segments = [(a, a + length, a, a) for a in range(0, total, length)]
        row = Pack(
            input_ids=torch.randint(5, 100, (1, total), device=DEVICE),
            positions=(torch.arange(total, device=DEVICE) % length).expand(3, 1, -1),
            attention=PackedAttention(segments, setup.backend, DEVICE),
        )
        with torch.inference_mode(), unwrapped_forward(vlm.decoder(model)):
            vlm.hidden_states(model, row)
            seconds = timed(lambda: vlm.hidden_states(model, row), 3)  # noqa: B023
        # causal: half of 4
        flops = 2 * layers * total + 2 * total * length * text.hidden_size * text.num_hidden_layers
        print(
            f"| {total} | {1e3 * seconds:.1f} | {total / seconds:.0f} | "
            f"{100 * flops / seconds / peak:.0f} % |",
            flush=True,
        )


def prepare_update(args, response: int) -> tuple[Trainable, Batch]:
    """An actor, and 8 prompts of 8 responses each, without vision tower: token ids and advantages are
    random. With --gradient_checkpointing auto packs are at most as large as it chose."""
    args = dataclasses.replace(args, samples_per_prompt=8, max_new_tokens=response)
    ranks, rows = distributed.start(args.timeout, args.hsdp), ppo.load_rows(args)
    ids, n = torch.randint(5, 100, (8, 2 * response)), 64 * response
    prompts = [
        dataclasses.replace(row, images=(), grids=(), input_ids=ids[i])
        for i, row in enumerate(rows.train[:8])
    ]
    models = ppo.build_models(args, rows.processor, ranks.device)
    planned = dataclasses.replace(rows, train_sets=[prompts])
    budget.fit(ppo.plan_memory(args, models.by_role(), planned, ranks.world), ranks)
    ppo.load_models(args, models.by_role(), ranks)
    trained = ppo.make_trainables(args, ppo.Models(models.actor, None, None))["actor"]
    responses = torch.randint(5, 100, (n,)).split(response)
    batch = Batch(prompts, list(range(8)), [0] * 8).with_responses(
        (k // 8, tokens) for k, tokens in enumerate(responses)
    )
    batch.sampling = ppo.sampling_of(args, rows.processor, DEVICE)
    batch.truncated, batch.in_policy_loss = (
        torch.zeros(64, dtype=torch.bool),
        torch.ones(n, dtype=torch.bool),
    )
    batch.advantages, batch.logprobs = torch.randn(n), torch.full((n,), -9.0)
    batch.old_logprobs = batch.logprobs
    return trained, batch


def measured_update(step) -> tuple[float, float]:
    """Seconds of an update, and its peak GiB; one before it compiles kernels."""
    step()
    if DEVICE.type != "cuda":
        return timed(step), float("nan")
    torch.cuda.reset_peak_memory_stats()
    return min(timed(step) for _ in range(2)), torch.cuda.max_memory_allocated() / 2**30


def update_table(args, budgets, response: int, peak: float) -> None:
    """One optimizer step of `prepare_update`."""
    trained, batch = prepare_update(args, response)
    actor, n = trained.module, 64 * response
    kind = f"LoRA of rank {args.lora_rank}" if args.lora_rank else "all weights"
    print(
        f"\nUpdate of {Path(args.model).name}, {kind}, AdamW, "
        f"--gradient_checkpointing {args.gradient_checkpointing}, "
        f"8 prompts of {2 * response} tokens x 8 responses of {response}: tokens counted per sample, MFU "
        "of the tokens computed, recomputation not counted\n\n"
        "| tokens per pack | prompts | s | tokens/s | MFU | peak GiB |"
        "\n|---|---|---|---|---|---|"
    )
    for most in budgets:
        chosen = actor.model.setup.updates
        tokens = chosen.tokens if chosen else most
        for shared in (True, False):
            step = functools.partial(ppo.update_actor, trained, None, batch, 1, None, args)
            with computing(actor, apart=not shared, max_tokens_per_pack=most):
                seconds, peak_gib = measured_update(step)
            computed = (8 if shared else 64) * 2 * response + n
            flops = memory.update_flops(actor, computed, n)
            print(
                f"| {tokens} | {'shared' if shared else 'repeated'} | {seconds:.2f} | "
                f"{64 * 3 * response / seconds:.0f} | "
                f"{100 * flops / seconds / peak:.0f} % | {peak_gib:.1f} |",
                flush=True,
            )
    step = functools.partial(ppo.update_actor, trained, None, batch, 1, None, args)
    with computing(actor, max_tokens_per_pack=budgets[-1]):
        print_kernels(f"an update, {tokens} tokens per pack, prompts shared", step, 24)


def scaled_and_summed(self: adapters.LoRALinear, x: torch.Tensor) -> torch.Tensor:
    """An adapter that passes over the layer's output twice more."""
    update = F.linear(F.linear(x, self.lora_A), self.lora_B)
    return F.linear(x, self.weight, self.bias) + self.scale * update


def lever_table(args, response: int) -> None:
    """An update with all layers recomputed, and variants of it. They are exact:
    tests/memory/test_recompute.py, tests/test_fused.py, tests/model/test_lora.py."""
    trained, batch = prepare_update(args, response)
    decoder = vlm.decoder(trained.module.model)
    theirs, count = sys.modules[type(decoder).__module__], len(decoder.layers)
    rotate = theirs.apply_rotary_pos_emb.args[0]  # as transformers has it
    unfused = [
        mock.patch.object(layers, "gated", layers.silu_product),
        mock.patch.object(theirs, "apply_rotary_pos_emb", rotate),
    ]
    summed = [mock.patch.object(adapters.LoRALinear, "forward", scaled_and_summed)]
    everything, most = UpdateSetting(16384, count), 5 * count // 6
    variants = [
        ("all recomputed", everything, []),
        ("gates and rotary positions not fused", everything, unfused),
        ("all but for attention", UpdateSetting(16384, count, True), []),
        (f"{most} of {count} but for attention", UpdateSetting(16384, most, True), []),
    ]
    if args.lora_rank:
        variants += [
            ("all recomputed, adapters scaled and summed", everything, summed),
            ("packs of 10,496, none", UpdateSetting(10496, 0), []),
            ("packs of 5,120, none", UpdateSetting(5120, 0), []),
        ]
    else:
        products = UpdateSetting(8192, count, True, count)
        variants += [
            ("packs of 8,192, all but for attention and products", products, []),
            ("packs of 5,120, none", UpdateSetting(5120, 0), []),
        ]
    print(f"\n{Path(args.model).name}\n\n| recomputed | s | peak GiB |\n|---|---|---|")
    step = functools.partial(ppo.update_actor, trained, None, batch, 1, None, args)
    for name, setting, patches in variants:
        recompute(trained.module.model, setting)
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            try:
                seconds, gib = measured_update(step)
            except torch.OutOfMemoryError:
                seconds = gib = float("nan")
                trained.optimizer.zero_grad()
        print(f"| {name} | {seconds:.3f} | {gib:.1f} |", flush=True)
        release()
    print_kernels(f"the last of these, {Path(args.model).name}", step, 24)


def whole_step(flags: list[str]) -> None:
    metrics = ppo.main(
        [*flags, "--steps", "2", "--save_every", "0", "--export_every", "0", "--log_samples", "0"]
    )
    print("\nThe second of two PPO steps\n\n| stage | value |\n|---|---|")
    for name, value in sorted(metrics.items()):
        if name.startswith("perf/"):
            print(f"| {name[5:]} | {value:.4g} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--levers", choices=("3b", "7b"))
    settings = parser.parse_args()
    tiny, short = settings.tiny, settings.short
    begun, folder = time.perf_counter(), Path(tempfile.mkdtemp())
    weights.fill = random_fill
    sizes, batches, contexts, steps = ("3b", "7b"), (1, 16, 64, 128, 256), (512, 1500, 4000), 16
    totals, budgets, prompts = (4096, 16384), (8192, 16384, 32768), "64"
    if short:
        sizes, batches, contexts, budgets, prompts = (
            ("3b", "7b"),
            (1, 8, 64, 256),
            (1000,),
            (16384,),
            "32",
        )
    if tiny:
        sizes, batches, contexts, steps, totals, budgets, prompts = (
            ("tiny",),
            (1, 4),
            (32,),
            4,
            (256,),
            (2048 + 8,),
            "4",
        )
    folders = {size: write_checkpoint(folder / size, size) for size in sizes}
    model = folders[sizes[0]]
    flags = [
        "--model",
        str(model),
        "--data",
        str(model / "rows.jsonl"),
        "--advantage",
        "grpo",
        "--reward",
        "exact",
        "--prompts_per_step",
        prompts,
        "--samples_per_prompt",
        "2" if tiny else "8",
        "--max_new_tokens",
        "8" if tiny else "256",
        "--max_prompt_tokens",
        "2048",
        "--gradient_checkpointing",
        "--out",
        str(folder / "run"),
    ]
    args = ppo.parse_args(flags)
    large = folders[sizes[-1]]
    adapted = ["--model", str(large), "--data", str(large / "rows.jsonl"), "--lora_rank", "32"]
    lora_args = ppo.parse_args([*flags, "--", *adapted, "--gradient_checkpointing", "auto"])
    setup = build.choose_compute(args, DEVICE, 32768)
    bandwidth, peak = limits(setup.dtype, tiny)
    tables = [attention_table]
    for size in sizes:
        tables += [
            functools.partial(
                decode_table, setup, folders[size], size, batches, contexts, steps, bandwidth
            ),
            functools.partial(prefill_table, setup, folders[size], size, totals, peak),
            functools.partial(
                decode_kernels, setup, folders[size], size, batches[-2], contexts[-1]
            ),
        ]
    tables += [
        functools.partial(update_table, args, budgets, 2 if tiny else 512, peak),
        functools.partial(
            update_table, lora_args, budgets[-1:] if tiny else (16384,), 2 if tiny else 512, peak
        ),
        functools.partial(whole_step, flags),
    ]
    levers = {
        "3b": functools.partial(lever_table, args, 2 if tiny else 512),
        "7b": functools.partial(lever_table, lora_args, 2 if tiny else 512),
    }
    if settings.levers:
        tables = [levers[settings.levers]]
    elif tiny:
        tables += levers.values()
    failed = 0
    # one that fails must not cost the others
    for table in tables:
        try:
            table()
        except Exception:
            traceback.print_exc()
            failed += 1
        release()
    print(f"\n{time.perf_counter() - begun:.0f} s in all")
    sys.exit(f"{failed} of {len(tables)} tables failed" if failed else 0)


if __name__ == "__main__":
    main()
