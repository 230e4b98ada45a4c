"""The padded layout: rows as long as their documents, from text to anchor.

Goal: only real tokens are stored, each equal to what the model gives for its row; pads reach no reduction. Method: 200
documents of very uneven length through the library, on tiny models. Oracle: the tokenizer on each text; raw hooks on
the transformers model, on the same batches (bit for bit) and on each row alone (to a tolerance). Controls: unmasked
reductions, flipped offsets.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anchorage.anchor import anchor_cache
from anchorage.corpusfile import open_corpus
from anchorage.errors import AnchorageError, CorpusError, IntegrityError, SettingsError
from anchorage.outliers import measure_outliers
from anchorage.pilot import forecast_run
from anchorage.probe.targets import check_probe
from anchorage.store.format import OFFSETS
from anchorage.store.names import published_part
from anchorage.store.reader import open_cache
from anchorage.store.shardfile import ShardFile
from anchorage.store.staging import Staging
from anchorage.store.verify import verify_cache
from plans import build_plan, capture
from stores import flip_bit, tree
from workflows import write_uneven

N_ROWS, SEQ_LEN = 200, 48
SITES = ["embed", "attn.1", "block.0", "block.2"]
TIERS = {
    "all": {"sites": SITES},
    "mean": {"sites": SITES, "reduce": "mean"},
    "last": {"sites": SITES, "reduce": "last", "rows": 150},
}
# Of float32 on tiny models: a row in its batch against the row alone, whose kernels have another shape.
TOLERANCE = 1e-5


def padded_plan(root, **changes):
    write_uneven(root / "uneven.jsonl", N_ROWS)
    corpus = {
        "layout": "padded",
        "rows": N_ROWS,
        "seq_len": SEQ_LEN,
        "min_chars": 1,
        "source": str(root / "uneven.jsonl"),
    }
    sections = {"capture": {"tiers": TIERS, "storage_dtype": "float32", "shard_rows": 32}} | changes
    kind = sections.pop("kind", "llama")
    build_plan(root, kind=kind)  # the model; what it writes beside it is not used
    return build_plan(root, kind=kind, corpus=corpus | sections.pop("corpus", {}), **sections)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A plan and its captured cache. Read it, or damage a copy."""
    root = tmp_path_factory.mktemp("whole")
    plan = padded_plan(root)
    capture(plan, root / "cache").close()
    return plan, root / "cache"


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy of the cache and its first shard, to be damaged."""
    cache = shutil.copytree(whole[1], tmp_path / "copy")
    return cache, cache / "all/part-0-shard-0.safetensors"


def oracle(plan, batch_rows):
    """Hidden states by raw hooks: ``{site: [row's [tokens, width], ...]}``; a batch is as long as its longest row."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(plan.settings.model.source, dtype=torch.float32).eval()
    trunk = getattr(model, "model", None) or model.transformer
    blocks = getattr(trunk, "layers", None) or trunk.h
    seen = {}

    def keep(name):
        def hook(module, args, output):
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    blocks[0].register_forward_pre_hook(lambda module, args: seen.update(embed=args[0]))
    names = ("self_attn", "attn", "self_attention")
    attention = next(module for name, module in blocks[1].named_children() if name in names)
    attention.register_forward_hook(keep("attn.1"))
    for index in (0, 2):
        blocks[index].register_forward_hook(keep(f"block.{index}"))
    found = {site: [] for site in SITES}
    for start in range(0, N_ROWS, batch_rows):
        stop = min(start + batch_rows, N_ROWS)
        lengths = plan.corpus.lengths(start, stop)
        ids = torch.from_numpy(plan.corpus.rows(start, stop)[:, : lengths.max()].astype(np.int64))
        mask = (torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]).long()
        with torch.no_grad():
            trunk(input_ids=ids, attention_mask=mask, use_cache=False)
        for site in SITES:
            found[site] += [value[:length].clone() for value, length in zip(seen[site], lengths, strict=True)]
    return found


def test_each_document_is_a_row_of_its_own(tmp_path):
    plan, texts = padded_plan(tmp_path), write_uneven(tmp_path / "uneven.jsonl", N_ROWS)
    tokenizer = AutoTokenizer.from_pretrained(plan.settings.model.source)
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    corpus = open_corpus(plan.tokens_path)
    lengths = corpus.lengths(0, N_ROWS)
    assert lengths.tolist() == [min(len(ids), SEQ_LEN) for ids in expected]
    assert min(lengths) < 4
    assert max(map(len, expected)) > SEQ_LEN
    for row, ids in enumerate(expected):
        stored = corpus.rows(row, row + 1)[0]
        assert stored[: lengths[row]].tolist() == ids[:SEQ_LEN]
        assert not stored[lengths[row] :].any()
        assert corpus.origin(row) == (row, 0)
    assert plan.n_tokens(range(N_ROWS)) == lengths.sum()


def test_too_few_documents_and_a_separator_are_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"fills 200 rows of one document each, and 500 are asked for"):
        padded_plan(tmp_path, corpus={"rows": 500})
    with pytest.raises(SettingsError, match=r"corpus.document_separator: must be false where layout is padded"):
        padded_plan(tmp_path, corpus={"document_separator": True})


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])  # rotary, learned, and no positions to be told
def test_what_is_stored_is_what_raw_hooks_see_of_real_tokens(tmp_path, kind):
    plan = padded_plan(tmp_path, kind=kind)
    cache = capture(plan, tmp_path / "cache")
    batched, alone = oracle(plan, plan.settings.capture.batch_rows), oracle(plan, 1)
    worst = 0.0
    for site in SITES:
        stored = cache.read_list(site, tier="all")
        mean, last = cache.read(site, tier="mean"), cache.read(site, tier="last")
        for row, value in enumerate(batched[site]):
            assert torch.equal(stored[row], value), (site, row)
            assert torch.equal(mean[row], value.mean(dim=0)), (site, row)
            assert row >= 150 or torch.equal(last[row], value[-1]), (site, row)
            single = alone[site][row]
            for found, expected in ((stored[row], single), (mean[row], single.mean(dim=0))):
                worst = max(worst, ((found - expected).norm() / expected.norm()).item())
        values, mask = cache.read_padded(site, range(40), tier="all")
        assert mask.sum(dim=1).tolist() == [len(value) for value in stored[:40]]
        assert not values[~mask].any()
        assert torch.equal(values[mask], torch.cat(stored[:40]))
    assert worst < TOLERANCE
    # control: were pads in the mean, it would be far off
    unmasked = (values.mean(dim=1) - mean[:40]).norm(dim=1) / mean[:40].norm(dim=1)
    assert unmasked.median() > 1000 * TOLERANCE


def test_rows_are_read_in_any_order_and_with_their_tokens(whole):
    plan, cache = whole[0], open_cache(whole[1])
    everything, tokens = cache.read_list("block.2", tier="all"), cache.token_list()
    for rows in ([7, 3, 3, 199, 64, 65, 66], range(30, 70), 5, slice(190, None), []):
        wanted = [rows] if isinstance(rows, int) else range(N_ROWS)[rows] if isinstance(rows, slice) else rows
        found = cache.read_list("block.2", rows, tier="all")
        assert [torch.equal(value, everything[row]) for value, row in zip(found, wanted, strict=True)] == [True] * len(
            wanted
        )
        assert [ids.tolist() for ids in cache.token_list(rows)] == [tokens[row].tolist() for row in wanted]
    for row in (0, 57, 199):
        assert (
            tokens[row].tolist() == plan.corpus.rows(row, row + 1)[0][: plan.corpus.lengths(row, row + 1)[0]].tolist()
        )
    with pytest.raises(AnchorageError, match="use read_list or read_padded"):
        cache.read("block.2", tier="all")
    with pytest.raises(AnchorageError, match="keeps one value a row"):
        cache.read_list("block.2", tier="mean")
    with pytest.raises(AnchorageError, match="use token_list"):
        cache.tokens()


def test_the_store_takes_the_bytes_of_real_tokens(whole):
    plan, cache = whole[0], open_cache(whole[1])
    n_tokens = plan.n_tokens(range(N_ROWS))
    real = n_tokens * (len(SITES) * 16 * 4 + 2)  # four sites, 16 wide, float32; a token id of 2 bytes
    stored = sum(path.stat().st_size for path in (cache.folder / "all").glob("*.safetensors"))
    a_shard = 1024 + 32 * 8 * (len(SITES) + 2)  # the header; digests and an offset a row
    assert real < stored <= 1.02 * real + plan.layout.n_shards * a_shard
    assert stored < 0.6 * N_ROWS * SEQ_LEN * (len(SITES) * 16 * 4 + 2)  # control: with pads it would be far more


def test_it_is_verified_and_anchored_exactly_and_its_outliers_are_of_real_tokens(whole):
    plan, cache = whole[0], open_cache(whole[1])
    parts = [cache.folder / published_part(part) for part in plan.layout.parts]
    assert verify_cache(cache.folder, parts, depth="full", log=lambda line: None)["ok"]
    report, table = anchor_cache(plan, cache, lambda line: None)
    assert (report["ok"], report["exact"]["mismatched"]) == (True, 0)
    assert report["exact"]["n_comparisons"] > 100
    assert len(table) == 6
    outliers = {row["site"]: row for row in measure_outliers(cache)[0]}
    values = torch.cat(cache.read_list("block.2", tier="all")).double()
    assert outliers["block.2"]["rms"] == pytest.approx(values.square().mean().sqrt().item())
    assert outliers["block.2"]["max_abs"] == values.abs().max().item()


@pytest.mark.parametrize("stop_after", [0, 3])
def test_stopped_and_resumed_it_ends_with_the_same_bytes(tmp_path, monkeypatch, stop_after):
    plan = padded_plan(tmp_path, capture={"tiers": TIERS, "shard_rows": 32, "parts": 2})
    whole = tree(capture(plan, tmp_path / "whole").folder)
    shutil.rmtree(tmp_path / "staging")
    commit, count = Staging.commit, []

    def stop(self, *arguments, **keywords):
        if len(count) == stop_after:
            raise KeyboardInterrupt
        count.append(1)
        return commit(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            capture(plan, tmp_path / "stopped")
    lines = []
    capture(plan, tmp_path / "stopped", lines)
    assert any(f"reused {stop_after}, captured" in line for line in lines)
    assert tree(tmp_path / "stopped") == whole


def test_a_longer_row_of_the_same_ids_is_another_text(whole):
    """A pad is id 0, and so may be a real token: only the lengths tell them apart, so they are in the digest."""
    corpus = open_corpus(whole[0].tokens_path)
    plain = {corpus.digest(row, row + 1) for row in range(N_ROWS)}
    texts = {corpus.rows(row, row + 1)[0].tobytes() for row in range(N_ROWS)}
    assert len(plain) == len(texts)
    corpus.lengths = lambda start, stop: np.full(stop - start, SEQ_LEN)  # as if every pad were real
    short = next(row for row in range(N_ROWS) if not corpus.rows(row, row + 1)[0][-1])
    assert corpus.digest(short, short + 1) not in plain


@pytest.mark.parametrize("bit", [0, 3, 62])
@pytest.mark.parametrize("row", [0, 5, 32])
def test_a_flipped_offset_is_found_by_reading(damaged, row, bit):
    cache, path = damaged
    flip_bit(path, ShardFile(path, {}).file.entries[OFFSETS].start + 8 * row + bit // 8, bit % 8)
    with pytest.raises(IntegrityError):
        open_cache(cache).read_list("block.2", range(32), tier="all")


def test_a_flipped_header_bit_is_found_or_changes_no_value(whole, damaged):
    cache, path = damaged
    data = path.read_bytes()
    expected = open_cache(whole[1]).read_list("block.2", range(32), tier="all")
    n_found, places = 0, range(0, 8 + int.from_bytes(data[:8], "little"), 2)
    for place in places:
        bit = 1 << (0, 5)[place // 2 % 2]  # another letter, another case
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        try:
            found = open_cache(cache).read_list("block.2", range(32), tier="all")
        except IntegrityError:
            n_found += 1
            continue
        assert all(map(torch.equal, found, expected)), data[place - 20 : place + 20]
    assert n_found > len(places) / 2


def test_bad_offsets_are_told_each_time(damaged):
    cache, path = damaged
    flip_bit(path, ShardFile(path, {}).file.entries[OFFSETS].start + 8 * 5 + 3, 0)
    opened = open_cache(cache)
    for _ in range(2):
        with pytest.raises(IntegrityError):
            opened.read_list("block.2", range(32), tier="all")


def test_the_plan_knows_the_bytes_of_padded_rows(whole):
    plan, cache = whole
    found = forecast_run(plan, lambda line: None)["run"]
    for tier, planned in found["tiers"].items():
        stored = sum(path.stat().st_size for path in (cache / tier).glob("*.safetensors"))
        headers = 1024 * len(list((cache / tier).glob("*.safetensors")))
        assert stored - headers < planned["gib"] * 2**30 <= stored


def test_probes_say_that_they_need_packed_rows(tmp_path):
    settings = padded_plan(tmp_path).settings
    with pytest.raises(SettingsError, match="layout is padded"):
        check_probe(settings.model_copy(update={"probe": settings.probe.model_copy(update={"tier": "all"})}))
