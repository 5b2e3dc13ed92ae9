"""The tables of scale.md: bytes moved per step, memory per GPU, the time of both, and the seconds
of a step by stage, from the shapes of public checkpoints.

    python tests/benchmarks/scale.py            # prints the tables; nothing is measured, everything is computed
    python tests/benchmarks/scale.py --write    # puts them into scale.md, between its marks

What is counted is what `train_ppo_vl.py` does: FSDP2 ZeRO-3 over all GPUs (`fully_shard` per
decoder layer, resharded after the forward), float32 master weights and Adam moments in shards,
bfloat16 gathers, float32 gradients reduced by reduce-scatter, rollouts on bfloat16 weights that
every GPU gathers whole, a critic of the actor's size, the vision tower frozen and replicated."""

import argparse
import math
from pathlib import Path

GIB, GB = 2**30, 1e9

# config.json of Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct on the Hugging Face hub: hidden_size,
# intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, vocab_size,
# tie_word_embeddings, and intermediate_size of the vision tower, which has depth 32, hidden_size
# 1280, patches of 2 x 14 x 14 and a merger of 2 x 2 in all of them.
MODELS = {
    "3B": (2048, 11008, 36, 16, 2, 151936, True, 3420),
    "7B": (3584, 18944, 28, 28, 4, 152064, False, 3420),
    "32B": (5120, 27648, 64, 40, 8, 152064, False, 3456),
    "72B": (8192, 29568, 80, 64, 8, 152064, False, 3456),
}
TRAFFIC_GPUS, MEMORY_GPUS = (8, 512), (8, 64)
HEAD_DIM = 128

# One step, the same per GPU at every size (weak scaling): what the tables assume and a user would change.
STEP = {
    "sequences per GPU": 32,
    "samples per prompt": 8,
    "prompt tokens": 1000,
    "response tokens": 1000,
    "updates": 1,
}
PACK = 16384  # --max_tokens_per_pack
NODE = 8  # GPUs that share NVLink
# bytes per second that a ring of collectives reaches on H100 NVLink 4 (450e9 nominal)
NVLINK = 300e9
# of one 400 Gbit InfiniBand port of a node; a node has 8 of them, or 1
PORT = 0.8 * 50e9
# bytes per second that a parallel file system takes from all nodes together
STORAGE = 20e9
FLOPS = 0.4 * 989e12  # of a dense bfloat16 H100, per GPU, at a utilisation of 40 %
MEMORY = 80e9 * 0.95  # bytes of a GPU that tensors may use

# Seconds of a PPO step by stage, on one node of 8 H100: shares of the peaks that kernels of this
# kind reach elsewhere.
HBM = 3.35e12  # bytes per second
PEAK = 989e12  # dense bfloat16
READS = {"weights": 0.85, "cache": 0.55, "logits": 0.85}  # share of HBM
REACHED = {"forward": 0.45, "update": 0.40, "prefill": 0.40, "tower": 0.35}  # share of PEAK
# kernels of a decoding step of 7B: 26 in each of 28 layers (tests/model/test_launches.py) and 55,
# the draw as one
LAUNCHES = 783
SMALL_KERNEL = 2.2e-6  # seconds of one of them inside a CUDA graph
# over the logits of a step, in float32: some 10, and 2 of the compiled draw
LOGIT_PASSES = 12
# seconds of a graph's capture and of a step without, and how many
CAPTURE, EAGER_STEP, EAGER_STEPS = 0.08, 0.024, 2
HEAD_BACKWARD = 0.018  # seconds per 1,024 response tokens
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# What is run: name -> prompts, samples, prompt tokens, image tokens, mean and longest response, and
# what others report for it.
TASKS = {
    "Geometry3k, 7B, GRPO with KL": (
        512,
        5,
        450,
        350,
        500,
        2048,
        "EasyR1 v0.3.0: 170 to 190; v0.3.2: 120 to 145",
    ),
    "the same, responses of 800": (512, 5, 600, 450, 800, 2048, ""),
}


def parameters(name: str) -> dict[str, int]:
    """Weights of the language model's layers, one layer, embeddings, head and vision tower."""
    hidden, inner, layers, heads, kv_heads, vocabulary, tied, vision_inner = MODELS[name]
    attention = (
        2 * hidden * heads * HEAD_DIM
        + 2 * hidden * kv_heads * HEAD_DIM
        + (heads + 2 * kv_heads) * HEAD_DIM
    )  # with biases
    layer = attention + 3 * hidden * inner + 2 * hidden
    block = (
        4 * 1280 * 1280 + 4 * 1280 + 3 * 1280 * vision_inner + 2 * vision_inner + 1280 + 2 * 1280
    )
    tower = 32 * block + 3 * 2 * 14 * 14 * 1280 + 1280 + 5120 * 5120 + 5120 + 5120 * hidden + hidden
    return {
        "layer": layer,
        "layers": layers * layer + hidden,
        "embedding": vocabulary * hidden,
        "head": 0 if tied else vocabulary * hidden,
        "tower": tower,
    }


def trained(name: str) -> tuple[int, int]:
    """Sharded weights of actor and critic; the critic has no output head."""
    size = parameters(name)
    critic = size["layers"] + size["embedding"]
    return critic + size["head"], critic


def traffic(name: str, gpus: int) -> dict[str, float]:
    """Bytes that one GPU receives (gathers) or sends (scatters) in one step, per purpose."""
    actor, critic = trained(name)
    share = (gpus - 1) / gpus
    tokens = STEP["sequences per GPU"] * (
        STEP["prompt tokens"] / STEP["samples per prompt"] + STEP["response tokens"]
    )
    packs = -(
        -tokens // PACK
        # FSDP gathers for every pack, forward and backward, and scatters gradients after every backward
    )
    return {
        "rollout gather": 2 * actor * share,
        "score gather": 2 * critic * packs * share,
        "update gather": 2 * 2 * (actor + critic) * packs * STEP["updates"] * share,
        "reduce-scatter": 4 * (actor + critic) * packs * STEP["updates"] * share,
    }


def bandwidth(gpus: int, ports: int) -> float:
    """Bytes per second of a ring over all GPUs: what enters a node passes its ports once and is
    spread by NVLink."""
    return NVLINK if gpus <= NODE else min(NVLINK, ports * PORT)


def compute_seconds(name: str) -> dict[str, float]:
    """Seconds of arithmetic of one GPU in a step, with gradient checkpointing; decoding by the
    weights and caches it reads."""
    actor, critic = trained(name)
    hidden, _, layers, _, kv_heads, *_ = MODELS[name]
    tokens = STEP["sequences per GPU"] * (
        STEP["prompt tokens"] / STEP["samples per prompt"] + STEP["response tokens"]
    )
    context = STEP["prompt tokens"] + STEP["response tokens"] / 2
    # bytes
    per_decode = (
        2 * actor + STEP["sequences per GPU"] * context * 2 * layers * kv_heads * HEAD_DIM * 2
    )
    # 60 % of 3.35e12 bytes per second of HBM
    return {
        "decode": STEP["response tokens"] * per_decode / 2.0e12,
        "update": 8 * tokens * (actor + critic) / FLOPS + 2 * tokens * critic / FLOPS,
    }


def memory(name: str, gpus: int) -> dict[str, float]:
    """Bytes on one GPU."""
    actor, critic = trained(name)
    size = parameters(name)
    hidden, inner, layers, _, kv_heads, vocabulary, *_ = MODELS[name]
    # masters, moments; one's gradient
    states = 12 * (actor + critic) / gpus + 4 * max(actor, critic) / gpus
    gathered = 2 * actor + 2 * size["tower"]  # the rollout's weights, whole
    cache = (
        2
        * 2
        * layers
        * kv_heads
        * HEAD_DIM
        * (STEP["prompt tokens"] + STEP["response tokens"])
        * STEP["sequences per GPU"]
    )
    # Update: two layers in flight and the root (embedding and head), their gradients in float32
    # before the scatter; the inputs of all layers of a pack, one layer's activations recomputed,
    # and three chunks of logits in float32.
    flight = (
        2 * 2 * size["layer"] + 4 * size["layer"] + (2 + 4) * (size["embedding"] + size["head"])
    )
    activations = (
        2 * PACK * hidden * layers
        + 2 * PACK * (12 * hidden + 3 * inner)
        + 3 * 4 * 1024 * vocabulary
    )
    return {
        "states": states,
        "rollout": states + gathered + cache,
        "update": states + 2 * size["tower"] + flight + activations,
        "gathered": gathered,
        "cache": cache,
    }


def decode_seconds(name: str, batch: float, context: float) -> float:
    """One decoding step of ``batch`` sequences: weights and caches once through the memory, noise,
    and small kernels."""
    size = parameters(name)
    _, _, layers, _, kv_heads, vocabulary, *_ = MODELS[name]
    cache = batch * context * layers * 2 * kv_heads * HEAD_DIM * 2
    reads = 2 * (size["layers"] + size["head"]) / READS["weights"] + cache / READS["cache"]
    logits = batch * vocabulary * 4 * LOGIT_PASSES / READS["logits"]
    return (reads + logits) / HBM + LAUNCHES * layers / MODELS["7B"][2] * SMALL_KERNEL


def rollout_seconds(
    name: str, samples: float, prompt: int, mean: int, longest: int, slots: int
) -> float:
    """Decoding on one GPU: full slots while prompts wait, then a tail in which response lengths
    fall off exponentially, at the batch sizes of the graphs, each captured once."""
    sizes = sorted({size for size in GRAPHS if size < slots} | {slots})
    full = max(0.0, samples - slots) * mean / slots * decode_seconds(name, slots, prompt + mean / 2)
    tail, used = 0.0, set()
    for step in range(longest):
        alive = max(1.0, slots * math.exp(-step / mean))
        batch = next(size for size in sizes if size >= min(slots, alive))
        used.add(batch)
        tail += decode_seconds(name, batch, prompt + min(step, mean))
    eager = sum(
        EAGER_STEPS * max(0.0, EAGER_STEP - decode_seconds(name, batch, prompt + mean))
        for batch in used
    )
    return full + tail + eager + len(used) * CAPTURE


def step_seconds(name: str, task: tuple, gpus: int = NODE, slots: int = 166) -> dict[str, float]:
    """Seconds of a PPO step by stage, with gradient checkpointing; rewards, packing and logging 2 s."""
    prompts, count, prompt, image, mean, longest, _ = task
    prompts_per_gpu, samples = prompts / gpus, prompts * count / gpus
    size = parameters(name)
    hidden, _, layers, heads, *_ = MODELS[name]
    attention = (
        4
        * layers
        * heads
        * HEAD_DIM
        * prompts_per_gpu
        * (prompt**2 / 2 + count * mean * (prompt + mean / 2))
    )
    forward = 2 * size["layers"] * (prompts_per_gpu * prompt + samples * mean) + attention
    tower = 2 * size["tower"] * prompts_per_gpu * image * 4
    head = samples * mean / 1024 * HEAD_BACKWARD
    update = 4 * forward / (PEAK * REACHED["update"]) + 0.5
    return {
        "rollout": rollout_seconds(name, samples, prompt, mean, longest, slots)
        + 2 * size["layers"] * prompts_per_gpu * prompt / (PEAK * REACHED["prefill"])
        + tower / (PEAK * REACHED["tower"])
        + 0.2,
        "score, each model": forward / (PEAK * REACHED["forward"]) + 0.4,
        "update critic": update,
        "update actor": update + head,
        "rest": 2.0,
    }


def checkpoint_bytes(name: str) -> float:
    """Masters and both moments of actor and critic, float32."""
    return 12 * sum(trained(name))


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]
    )


def tables() -> dict[str, str]:
    """Mark -> table."""
    by_mark = {}
    rows = []
    for name in MODELS:
        size, (actor, critic) = parameters(name), trained(name)
        rows.append(
            [
                name,
                *(f"{value / 1e9:.2f}" for value in (actor, critic, size["tower"])),
                f"{size['layer'] / 1e6:.0f}",
                f"{checkpoint_bytes(name) / GB:.0f}",
            ]
        )
    by_mark["models"] = table(
        ["model", "actor (1e9)", "critic", "tower", "layer (1e6)", "checkpoint (GB)"], rows
    )
    rows = []
    for name in MODELS:
        for gpus in TRAFFIC_GPUS:
            moved, work = traffic(name, gpus), compute_seconds(name)
            update = sum(moved.values()) - moved["rollout gather"]
            seconds = [
                f"{(moved['rollout gather'] + update) / bandwidth(gpus, ports):.1f}"
                if gpus > NODE or ports == 8
                else ""
                for ports in (8, 1)
            ]
            rows.append(
                [
                    name,
                    str(gpus),
                    f"{sum(moved.values()) / GB:.0f}",
                    *seconds,
                    f"{work['update'] + work['decode']:.0f}",
                ]
            )
    by_mark["traffic"] = table(
        [
            "model",
            "GPUs",
            "traffic (GB)",
            "its seconds, 8 ports a node",
            "1 port",
            "arithmetic and decoding (s)",
        ],
        rows,
    )
    rows = []
    for name in MODELS:
        for gpus in MEMORY_GPUS:
            need = memory(name, gpus)
            fits = [stage for stage in ("rollout", "update") if need[stage] > MEMORY]
            rows.append(
                [
                    name,
                    str(gpus),
                    *(f"{need[key] / GB:.0f}" for key in ("states", "rollout", "update")),
                    "yes" if not fits else "no: " + ", ".join(fits),
                ]
            )
    steps = []
    for task, numbers in TASKS.items():
        seconds = step_seconds("7B", numbers)
        scored, critic, actor = (
            seconds[key] for key in ("score, each model", "update critic", "update actor")
        )
        shared = seconds["rollout"] + actor + seconds["rest"]
        steps.append(
            [
                task,
                *(f"{value:.0f}" for value in seconds.values()),
                f"{shared + scored:.0f}",
                f"{shared + 2 * scored + critic:.0f}",
                numbers[-1],
            ]
        )
    names = step_seconds("7B", next(iter(TASKS.values())))
    by_mark["step"] = table(
        ["computed, s", *names, "GRPO with KL", "PPO with critic and KL", "reported by others, s"],
        steps,
    )
    by_mark["memory"] = table(
        ["model", "GPUs", "states (GB)", "rollout", "update", "fits 80 GB?"],
        rows,
    )
    return by_mark


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into scale.md")
    flags = parser.parse_args()
    path = Path(__file__).with_suffix(".md")
    text = path.read_text() if flags.write else ""
    for mark, content in tables().items():
        print(f"{mark}\n\n{content}\n")
        if flags.write:
            begin, end = f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->"
            text = text[: text.index(begin) + len(begin)] + content + text[text.index(end) :]
    if flags.write:
        path.write_text(text)


if __name__ == "__main__":
    main()
