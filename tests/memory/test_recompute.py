"""common/memory/recompute.py: layers that are computed again, and what they keep, change no bit of a gradient;
as many bytes are alive as common/memory/memory.py says."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.varlen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForImageTextToText

from common.ground import process
from common.memory import recompute
from common.model import layers, packs
from common.model.vlm import UpdateSetting
from conftest import marked, seeded, start, take, write_checkpoint, write_json
from helpers import (
    HAND_FLAGS,
    NormOfAGPU,
    compile_layers,
    gradient,
    hand_batch,
    needs_compiler,
    peak_of_an_update,
    planned_peak,
    stir_value_head,
)

LAYERS = 3
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5"])
def deep(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep") / request.param
    return write_checkpoint(folder, request.param, layers=LAYERS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """With activations that outweigh masks and tables."""
    folder = tmp_path_factory.mktemp("wide")
    write_json(folder / "rows.jsonl", {"prompt": "a b " * 5})
    write_checkpoint(folder, "qwen2_5_vl", layers=LAYERS, hidden_size=128)
    config = AutoConfig.from_pretrained(folder)
    config.text_config.intermediate_size = 640
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


class Operators(TorchDispatchMode):
    """Counts what is computed inside, by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.name()] += 1
        return function(*args, **(kwargs or {}))


def settings(attention: bool, products: bool):
    """None, one, all but one and all of the layers computed again, with all that they may keep."""
    for recomputed in (0, 1, LAYERS - 1, LAYERS):
        yield UpdateSetting(600, recomputed)
        if attention:
            yield UpdateSetting(600, recomputed, True)
        if products:
            for with_products in sorted({min(1, recomputed), recomputed}):
                yield UpdateSetting(600, recomputed, True, with_products)


# None, all, and layers of each sort: for bfloat16, which is slow on a CPU
EACH = (
    UpdateSetting(600, 0),
    UpdateSetting(600, LAYERS),
    UpdateSetting(600, LAYERS - 1, True, 1),
)


def assert_equal_gradients(env, batch, chosen=()) -> None:
    for module in filter(None, (env.actor, env.critic)):
        module.train()
        expected, _ = gradient(env.args, module, batch)
        for setting in chosen or settings(*recompute.can_keep(module.model)):
            recompute.recompute(module.model, setting)
            actual, _ = gradient(env.args, module, batch)
            for name, value in actual.items():
                assert torch.equal(value, expected[name]), (setting, name)


@pytest.mark.parametrize("flags", marked(["", "--lora_rank 2"]))
def test_every_bit_of_a_gradient_is_the_same(deep, picture_rows, flags):
    env = start(deep, picture_rows, HAND_FLAGS, *flags.split())
    stir_value_head(env.critic)
    attention, products = recompute.can_keep(env.actor.model)
    assert attention == (deep.name != "qwen3_5")  # whose decays FSDP gathers by themselves
    assert products == (attention and not flags)
    assert_equal_gradients(env, hand_batch(env))


@pytest.mark.slow
@pytest.mark.parametrize("deep", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
def test_with_the_back_ends_of_a_gpu(deep, picture_rows, backend, kernels):
    env = start(deep, picture_rows, HAND_FLAGS, "--dtype bfloat16 --attention", backend)
    stir_value_head(env.critic)
    assert_equal_gradients(env, hand_batch(env), EACH)
    assert kernels.calls


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("deep", ["qwen2_5_vl"], indirect=True)
@pytest.mark.skipif(torch.__version__ < "2.12", reason="its compiler leaves roundings out on a CPU")
def test_with_gates_and_rotary_positions_compiled(deep, picture_rows, monkeypatch):
    """They are computed again in the same way, and in bfloat16 change no bit of a gradient."""
    env = start(deep, picture_rows, HAND_FLAGS, "--dtype bfloat16")
    stir_value_head(env.critic)
    batch, modules = hand_batch(env), (env.actor, env.critic)
    plain = [gradient(env.args, module.train(), batch)[0] for module in modules]
    compile_layers(monkeypatch)
    assert_equal_gradients(env, batch, EACH)
    for module, expected in zip(modules, plain):
        actual, _ = gradient(env.args, module, batch)
        assert all(torch.equal(value, expected[name]) for name, value in actual.items())


@pytest.mark.slow
def test_what_is_kept_is_not_computed_again(wide, picture_rows):
    """Attention, and the six products that a backward needs the results of: all but the last of the MLP."""
    env = start(wide, picture_rows, HAND_FLAGS)
    batch, calls = hand_batch(env), {}
    env.actor.train()
    for setting in settings(True, True):
        recompute.recompute(env.actor.model, setting)
        with Operators() as done:
            _, count = gradient(env.args, env.actor, batch)
        calls[setting[1:]] = done.calls
    without = calls[0, False, 0]
    for (recomputed, attention, products), counts in calls.items():
        again = counts[ATTENTION] - without[ATTENTION]
        assert again == (0 if attention else recomputed * without[ATTENTION] / LAYERS)
        again = sum(counts[name] - without[name] for name in recompute.PRODUCTS)
        assert again == (recomputed - products) * 6 * count


class FlashAttention:
    """Of a package that is not installed here."""

    def name(self) -> str:
        return "flash_attn::_flash_attn_varlen_forward"


def test_attention_is_known_by_its_operators():
    names = torch.ops
    for operator in (
        names.torch_attn._varlen_attn.default,
        names.aten._flash_attention_forward.default,
        names.aten._scaled_dot_product_efficient_attention.default,
        names.aten._scaled_dot_product_flash_attention_for_cpu.default,
        FlashAttention(),
    ):
        assert recompute.is_attention(operator)
    assert not recompute.is_attention(names.aten.mm.default)


# bfloat16 takes a CPU a minute; test_plan.py has it with all weights trained
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, tokens", [("--dtype float32", 1000), ("--dtype bfloat16 --lora_rank 2", 250)]
)
def test_bytes_of_an_update_are_those_of_its_setting(wide, flags, tokens, monkeypatch):
    """The plan of a setting is within 5 % of the most bytes that are alive."""
    monkeypatch.setattr(layers.F, "rms_norm", NormOfAGPU.apply)
    env = start(wide, wide / "rows.jsonl", flags)
    batch = take(env, 1).with_responses(
        [(0, torch.randint(4, 200, (tokens,), generator=seeded(0)))]
    )
    _, products = recompute.can_keep(env.actor.model)
    chosen = [
        UpdateSetting(2000, 0),
        UpdateSetting(2000, 1, True),
        UpdateSetting(2000, LAYERS - 1, True, 2 * products),
        UpdateSetting(2000, LAYERS),
        UpdateSetting(2000, LAYERS, True, LAYERS * products),
    ]
    if "bfloat16" in flags:
        chosen = [chosen[0], chosen[2]]
    for module in (env.actor, env.critic):
        module.model.setup.head_chunk = 64
        for setting in chosen if module is env.actor else chosen[::3]:
            recompute.recompute(module.model, setting)
            peak, row = peak_of_an_update(env, module, batch)
            setting = setting._replace(tokens=row.input_ids.shape[1])
            share = planned_peak(module, setting) / peak
            print(f"{flags}, {type(module).__name__}, {setting}: {peak} bytes, planned {share:.3f}")
            assert 0.95 < share < 1.05, setting


def test_packs_of_updates_are_smaller_than_others(deep, picture_rows):
    """The flag's value holds where there is no backward."""
    env = start(deep, picture_rows, HAND_FLAGS)
    batch, model = hand_batch(env), env.actor.model
    lengths = lambda: [pack.input_ids.shape[1] for pack in packs.of_batch(model, batch)]  # noqa: E731
    (whole,) = lengths()
    recompute.recompute(model, UpdateSetting(whole // 2, 0))
    assert max(lengths()) <= whole // 2
    with torch.no_grad():
        assert lengths() == [whole]


def test_an_error_of_memory_names_what_was_chosen(capsys, monkeypatch):
    model = SimpleNamespace(setup=SimpleNamespace(updates=UpdateSetting(7168, 0)))

    def update():
        with recompute.explain_memory(model):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    class Ended(BaseException):
        pass

    def end(code):
        raise Ended

    monkeypatch.setattr(process, "leave", end)  # which would do all that pytest does at its end
    monkeypatch.setattr(process, "die_with_torchrun", lambda: None)
    monkeypatch.setattr(process, "is_first", lambda: True)  # of each of the two runs
    for setting, told in ((UpdateSetting(7168, 0), True), (None, False)):
        model.setup.updates = setting
        with pytest.raises(Ended):
            process.run_main(update)
        text = capsys.readouterr().err
        note = (
            "in an update with packs of 7,168 tokens, nothing recomputed, as --gradient_checkpointing auto "
            "chose: --gradient_checkpointing on recomputes all layers"
        )
        assert (note in text) == told
        assert process.OUT_OF_MEMORY in text


def test_settings_in_words():
    for setting, text in (
        ((16384, 21), "packs of 16,384 tokens, the first 21 layers recomputed"),
        ((512, 1, True), "packs of 512 tokens, the first 1 layers recomputed but for attention"),
        (
            (512, 9, True, 2),
            "packs of 512 tokens, the first 9 layers recomputed but for attention, and for products in 2 of them",
        ),
    ):
        assert str(UpdateSetting(*setting)) == text
