"""Every site holds, bit for bit, what the model's module hands over at that place, for many architectures.

Method: tiny random models. The oracle is bare torch hooks on another copy of the transformers model, at places from a
table written by hand (PLACES), which copy as they fire; neither nnsight nor our search has a part in it.
"""

from __future__ import annotations

import gc
import weakref
from functools import cache
from itertools import combinations

import pytest
import torch

from anchorage.architecture import find_trunk
from anchorage.sites import stable_names
from anchorage.trunk import SiteReader, find_sites, probe_sites, trimmed
from tiny_models import KINDS, N_LAYERS, VOCAB_SIZE, WIDTH, place_of, tiny_model

ROWS, LENGTH = 3, 7
NAMES = stable_names(N_LAYERS)


def some_ids():
    return torch.randint(VOCAB_SIZE, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))


def hook_sites(model, wanted, ids):
    """Run the whole model under bare hooks. ``wanted``: name -> (module path, is it the input?)."""
    found, modules, handles = {}, dict(model.named_modules()), []

    def keep(name, value):
        first = value[0] if isinstance(value, tuple) else value
        assert name not in found
        found[name] = first.detach().clone().reshape(ROWS, LENGTH, -1)

    for name, (path, is_input) in wanted.items():
        if is_input:

            def before(module, args, kwargs, name=name):
                keep(name, args[0] if args else kwargs["hidden_states"])

            handles.append(modules[path].register_forward_pre_hook(before, with_kwargs=True))
        else:

            def after(module, args, output, name=name):
                keep(name, output)

            handles.append(modules[path].register_forward_hook(after))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@cache
def hooked(kind):
    wanted = {name: (place_of(kind, name), name == "embed") for name in NAMES}
    return hook_sites(tiny_model(kind), wanted, some_ids())


@cache
def shared_model(kind):
    return tiny_model(kind)


def open_trunk(kind, **overrides):
    return find_trunk(tiny_model(kind, **overrides))


def probe(trunk, names):
    return probe_sites(trunk, find_sites(trunk, names), "cpu")


def read_all(reader, ids):
    found = {}

    def take(site, value):
        assert site.name not in found
        found[site.name] = value.clone()

    reader.read(ids, take)
    return found


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_stable_site_equals_raw_hooks(kind):
    trunk = find_trunk(shared_model(kind))
    sites, widths = probe(trunk, list(reversed(NAMES)))
    assert [site.name for site in sites] == NAMES
    assert widths == dict.fromkeys(NAMES, WIDTH)
    found = read_all(SiteReader(trunk, sites), some_ids())
    assert not any(value.requires_grad for value in found.values())
    assert_same(found, {name: hooked(kind)[name] for name in NAMES})


@pytest.mark.parametrize("kind", KINDS)
def test_control_no_two_sites_hold_the_same(kind):
    # Were two sites alike, the test above could not see one taken for the other.
    for one, other in combinations(NAMES, 2):
        if kind == "bloom" and (one, other) in zip(NAMES[2::3], NAMES[3::3], strict=True):
            continue  # its feed-forward module adds the residual itself: mlp.i is block.i
        assert not torch.equal(hooked(kind)[one], hooked(kind)[other]), (one, other)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "opt", "gemma3_text"])
@pytest.mark.parametrize("made", ["before", "inside"])
@pytest.mark.parametrize("depth", [1, 2])
def test_trimmed_run_is_bit_equal_and_ends_early(kind, made, depth):
    model = tiny_model(kind)
    trunk = find_trunk(model)
    names = stable_names(depth)
    sites, _ = probe(trunk, names)
    assert max(site.depth for site in sites) == depth
    late, visits = trunk.layers[depth], []
    handle = late.register_forward_hook(lambda *_: visits.append(1))
    before = SiteReader(trunk, sites)
    with trimmed(trunk, depth):
        reader = before if made == "before" else SiteReader(trunk, sites)
        found = read_all(reader, some_ids())
    assert_same(found, {name: hooked(kind)[name] for name in names})
    assert not visits
    handle.remove()
    # The whole list is back: the same reader and a new one see every block again.
    assert_same(read_all(reader, some_ids()), {name: hooked(kind)[name] for name in names})
    sites, _ = probe(trunk, NAMES)
    assert_same(read_all(SiteReader(trunk, sites), some_ids()), {name: hooked(kind)[name] for name in NAMES})


def test_trimmed_restores_the_list_after_an_error():
    trunk = open_trunk("gpt2")
    blocks, state = list(trunk.layers), list(trunk.module.state_dict())

    def fail_inside():
        with trimmed(trunk, 1):
            assert len(trunk.layers) == len(trunk.module.h) == 1
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail_inside()
    assert list(trunk.layers) == blocks
    assert list(trunk.module.state_dict()) == state


@pytest.mark.parametrize("depth", [N_LAYERS, N_LAYERS + 1])
def test_trimmed_to_all_blocks_changes_nothing(depth):
    trunk = open_trunk("gpt2")
    blocks = list(trunk.layers)
    with trimmed(trunk, depth):
        assert list(trunk.layers) == blocks
    assert list(trunk.layers) == blocks


def test_sites_are_found_while_the_trunk_is_trimmed():
    trunk = open_trunk("gpt2")
    with trimmed(trunk, 1):
        assert [site.depth for site in find_sites(trunk, ["embed", "mlp.0", "block.2"])] == [1, 1, 3]


def test_raw_paths_full_or_relative_hold_what_their_module_hands_over():
    trunk = open_trunk("gpt2")
    names = ["transformer.h.1.mlp.c_fc", "h.0.ln_2", "block.1", "h.1", "transformer.wte", "embed", "transformer.ln_f"]
    sites, widths = probe(trunk, names)
    in_running_order = [
        "transformer.wte",
        "embed",
        "h.0.ln_2",
        "transformer.h.1.mlp.c_fc",
        "block.1",
        "h.1",
        "transformer.ln_f",
    ]
    assert [site.name for site in sites] == in_running_order
    assert widths["transformer.h.1.mlp.c_fc"] == 4 * WIDTH
    depths = {site.name: site.depth for site in sites}
    assert depths["h.0.ln_2"] == 1
    assert depths["h.1"] == 2
    assert depths["transformer.ln_f"] == depths["transformer.wte"] == N_LAYERS
    wanted = {
        "transformer.wte": ("transformer.wte", False),
        "embed": ("transformer.h.0", True),
        "h.0.ln_2": ("transformer.h.0.ln_2", False),
        "transformer.h.1.mlp.c_fc": ("transformer.h.1.mlp.c_fc", False),
        "block.1": ("transformer.h.1", False),
        "h.1": ("transformer.h.1", False),
        "transformer.ln_f": ("transformer.ln_f", False),
    }
    assert_same(read_all(SiteReader(trunk, sites), some_ids()), hook_sites(tiny_model("gpt2"), wanted, some_ids()))


@pytest.mark.parametrize("kind", ["gpt2", "opt", "qwen3"])
def test_cache_in_half_precision_equals_reading_and_then_casting(kind):
    trunk = find_trunk(shared_model(kind))
    sites, _ = probe(trunk, NAMES)
    reader = SiteReader(trunk, sites)
    for dtype in (torch.float16, torch.bfloat16, None):
        expected = {name: value.to(dtype or torch.float32) for name, value in hooked(kind).items()}
        cached = reader.cache(some_ids(), dtype)
        assert_same(cached, {name: expected[name] for name in NAMES})
        assert {value.dtype for value in cached.values()} == {dtype or torch.float32}


def test_a_later_change_in_place_reaches_the_cache_but_not_what_was_taken():
    model = tiny_model("llama")
    block = model.model.layers[1]
    forward = block.forward

    def forward_that_changes_its_input(hidden, *args, **kwargs):
        hidden.add_(1)
        return forward(hidden, *args, **kwargs)

    block.forward = forward_that_changes_its_input
    expected = hook_sites(model, {"block.0": ("model.layers.0", False)}, some_ids())["block.0"]
    trunk = find_trunk(model)
    sites, _ = probe(trunk, ["block.0", "block.1"])
    reader = SiteReader(trunk, sites)
    assert torch.equal(read_all(reader, some_ids())["block.0"], expected)
    # The hazard: without a cast, nnsight's cache hands out the very tensor that changes afterwards. A cast copies.
    assert torch.equal(reader.cache(some_ids(), None)["block.0"], expected + 1)
    assert torch.equal(reader.cache(some_ids(), torch.float32)["block.0"], expected + 1)
    assert torch.equal(reader.cache(some_ids(), torch.float16)["block.0"], expected.half())


def test_an_error_of_the_taker_arrives_as_it_is_and_the_reader_lives_on():
    class PlantedError(Exception):
        pass

    trunk = find_trunk(shared_model("gpt2"))
    sites, _ = probe(trunk, NAMES)
    reader, seen = SiteReader(trunk, sites), []

    def take(site, value):
        seen.append(site.name)
        if site.name == "mlp.0":
            raise PlantedError("row 3")

    with pytest.raises(PlantedError, match="row 3"):
        reader.read(some_ids(), take)
    assert seen == ["embed", "attn.0", "mlp.0"]
    assert_same(read_all(reader, some_ids()), {name: hooked("gpt2")[name] for name in NAMES})


def test_nothing_of_a_pass_is_left_behind():
    trunk = find_trunk(shared_model("llama"))
    sites, _ = probe(trunk, NAMES)
    reader, handed = SiteReader(trunk, sites), []
    gc.collect()
    gc.disable()  # reference counts alone must free it: a cycle would pile up batches until the collector runs
    try:
        reader.read(some_ids(), lambda site, value: handed.append(weakref.ref(value)))
        assert len(handed) == len(NAMES)
        assert not any(ref() is not None for ref in handed)
    finally:
        gc.enable()
