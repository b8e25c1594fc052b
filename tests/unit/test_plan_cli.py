"""``csbp plan``: what it prints, what it draws, what it refuses, and that it needs neither torch nor data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packs import make_layout, make_pack

from csbp.cli import main
from csbp.config.compose import compose_run
from csbp.config.places import planned_families
from csbp.errors import ConfigError
from csbp.observe.picture import draw_plan, shares, stripes
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.lengths import document_lengths, packs_of
from csbp.plan.plan import PackPlan
from csbp.plan.runs import Runs
from csbp.plan.shapes import model_shape
from csbp.plan_cli import plan_result

GIB = 2**30
PLANNED = ["nemotron_3b_sft", "nemotron_8b_sft", "nemotron_14b_sft", "diffusion_gemma_26b_a4b_sft", "qwen3_8b_sdar"]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["plan", *words])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = answer(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(("experiment", "kind"), [*((name, "csbp") for name in PLANNED), (PLANNED[3], "context"),
                                                  (PLANNED[1], "block"), (PLANNED[2], "data")])
def test_every_experiment_can_be_planned(capsys: pytest.CaptureFixture[str], experiment: str, kind: str) -> None:
    found = planned(capsys, f"experiment={experiment}", f"parallel.kind={kind}", "parallel.nproc=4",
                    "data.seq_len=8192")
    assert (found["kind"], found["world_size"], found["tokens"]) == (kind, 4, 8192)
    assert found["max_over_mean_pairs"] >= 1
    assert found["peak_memory_bytes_per_rank"] > 16 * found["parameters"] / 4  # weights, gradients, AdamW
    assert found["predicted_step_seconds"] > 0
    assert sum(rank["clean_rows"] for rank in found["ranks"]) >= 8192
    assert (found["bytes_received_exact_mean"] > 0) == (kind in ("csbp", "context"))


def test_published_bytes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With options among the settings, and parallel.csbp alone saying how many ranks there are."""
    found = planned(capsys, "experiment=nemotron_14b_sft", "--json", "parallel.csbp=8", "data.seq_len=262144")
    assert found["world_size"] == 8
    assert found["bytes_received_per_rank"] == 105 * GIB
    assert found["bytes_received_per_rank_context"] == 210 * GIB
    assert found["bytes_received_exact_mean"] == pytest.approx(78.75 * GIB, rel=1e-3)
    assert found["bytes_received_exact_mean"] < found["bytes_received_exact_max"] < found["bytes_received_per_rank"]
    assert found["max_over_mean_pairs"] < 1.001 and found["max_over_lower_bound"] < 1.05
    assert found["max_over_mean_pairs_contiguous"] == pytest.approx(23 / 16, abs=1e-3)
    gemma = planned(capsys, "experiment=diffusion_gemma_26b_a4b_sft", "parallel.csbp=8", "data.seq_len=262144")
    assert round(gemma["bytes_received_per_rank"] / GIB, 2) == 28.30
    assert gemma["bytes_received_per_rank_context"] == 433.125 * GIB


def test_reported_bytes_are_those_of_the_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("3000\n\n500\n 2000 \n1000\n")
    found = planned(capsys, "experiment=nemotron_3b_sft", "parallel.csbp=3", "data.seq_len=6000",
                    f"data.document_lengths={lengths}")
    assert (found["documents"], found["tokens"]) == (4, 6000)
    ranks = found["ranks"]
    received = [rank["bytes_received"] for rank in ranks]
    assert found["bytes_received_exact_mean"] == pytest.approx(np.mean(received))
    assert found["bytes_received_exact_max"] == max(received)
    assert sum(received) == sum(rank["bytes_sent"] for rank in ranks)
    assert sum(rank["noised_rows"] for rank in ranks) == 6000
    assert found["peak_memory_bytes_per_rank"] == max(rank["memory_bytes"] for rank in ranks)
    # A step of 8 packs on one replica is 8 packs' time; the slowest rank's parts add up to one.
    slowest = max(r["attention_seconds"] + r["linear_seconds"] + r["exposed_seconds"] for r in ranks)
    assert found["predicted_step_seconds"] == pytest.approx(8 * slowest)


def test_the_report_says_what_fits_and_what_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("experiment=nemotron_8b_sft", "parallel.nproc=8", "parallel.compile=false")
    code, out, _ = answer(capsys, *words, "data.seq_len=1024")
    assert code == 0 and "8.49B parameters" in out
    assert "Plain data parallel (parallel.kind=data) would be faster" in out and "csbp fits" in out
    out = answer(capsys, *words, "data.seq_len=131072", "train.logit_rows=1024")[1]
    assert "data does not fit" in out and "block does not fit" in out and "csbp fits" in out
    assert "Plain data parallel is out" in out and "parallel.kind=csbp" in out
    table = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [int(row[0]) for row in table if len(row) > 9 and row[0].isdigit()] == list(range(8))


def remedies_of(out: str) -> dict[str, str]:
    """Settings -> what they would do, where nothing fits."""
    advice = out[out.index("Nothing fits"):].splitlines()[1:]
    return dict(line.strip().split(": ") for line in advice if ": " in line)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "largest", "offered"), [
    ([], "activations", {"parallel.offload=true", "parallel.nproc=16 parallel.csbp=16", "parallel.checkpointing=full"}),
    (["parallel.checkpointing=full", "data.seq_len=1048576"], "activations",
     {"parallel.offload=true", "parallel.nproc=16 parallel.csbp=16"}),
    (["parallel.checkpointing=full", "parallel.offload=true", "train.logit_rows=400000",
      "data.seq_len=1048576"], "loss",
     {"train.logit_rows=null", "parallel.nproc=16 parallel.csbp=16"}),
    (["parallel.kind=data", "parallel.checkpointing=full", "data.seq_len=1048576"], "activations",
     {"parallel.kind=csbp parallel.offload=true", "parallel.kind=csbp parallel.nproc=16 parallel.csbp=16"})])
def test_what_would_help_where_nothing_fits(capsys: pytest.CaptureFixture[str], words: list[str], largest: str,
                                            offered: set[str]) -> None:
    """Nothing that is set already, and each does what is said of it."""
    words = ["experiment=nemotron_8b_sft", "parallel.nproc=8", "parallel.compile=false", "data.seq_len=524288", *words]
    out = answer(capsys, *words)[1]
    assert f"is {largest}, " in out.split("Nothing fits. ")[1].splitlines()[0]
    found = remedies_of(out)
    assert set(found) == offered
    for change, said in found.items():
        then = planned(capsys, *words, *change.split())
        fits = "fits" if then["fits"] else "still too much"
        assert said == f"{then['peak_memory_bytes_per_rank'] / GIB:.2f} GiB, {fits}"
    sizes = [float(said.split()[0]) for said in found.values()]
    assert sizes == sorted(sizes)


def test_shown_commands_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the README, of docs/planning.md and of csbp plan --help."""
    root = Path(__file__).parents[2]
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = (root / "README.md").read_text() + (root / "docs/planning.md").read_text() + capsys.readouterr().out
    shown = [line.partition("#")[0].split()[2:] for line in text.splitlines() if line.strip().startswith("csbp plan ")]
    shown = [words for words in shown if "my.yaml" not in " ".join(words) and "lengths.txt" not in " ".join(words)]
    assert len(shown) >= 3
    for words in shown:
        assert planned(capsys, *words)["fits"], words


def test_small_numbers_are_shown_as_such(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("experiment=quickstart", "parallel.nproc=1", "data.document_tokens=2048")
    picture = tmp_path / "plan.svg"
    out = answer(capsys, *words, "--picture", str(picture))[1]
    assert "3.3M parameters; a pack of 2,048 tokens in 1 document, 256 target blocks" in out
    assert "received keys 0," in out and "0.0 MiB" not in out and out.endswith(f"picture: {picture}\n")
    assert "in 1 document, 1 rank," in picture.read_text()
    code, out, err = answer(capsys, *words, "--json", "--picture", str(picture))
    assert json.loads(out)["predicted_mfu"] is None and err == f"picture: {picture}\n"
    assert 0.3 < planned(capsys, *words, "plan.device=h200")["predicted_mfu"] < 1


@pytest.mark.parametrize(("words", "said"), [
    (["parallel.csbp=16", "data.seq_len=256"], "parallel.csbp=16: more ranks than blocks"),
    (["parallel.nproc=16", "data.seq_len=256"], "parallel.nproc=16: more ranks than blocks"),
    (["parallel.csbp=3", "parallel.nproc=8"], "must divide parallel.nproc=8"),
    (["model.shape.layer_types=[sliding_attention, sliding_attention]", "model.shape.num_hidden_layers=2",
      "model.shape.sliding_window=16"], "model.shape.sliding_window=16: smaller than a block"),
    (["model.shape.layer_types=[linear_attention]", "model.shape.num_hidden_layers=1"], "linear_attention"),
    (["+model.shape.kv_lora_rank=512"], "model.shape.kv_lora_rank=512: multi-head latent attention (MLA)"),
    (["+model.shape.alibi=true"], "model.shape.alibi=true: ALiBi"),
    (["model.shape.hidden_size=0"], "model.shape.hidden_size=0"),
    (["model.shape.num_key_value_heads=5"], "must divide num_attention_heads=32"),
    (["data.document_tokens=262145", "data.seq_len=262144"],
     "data.document_tokens=262145: a document must fit a pack: at most data.seq_len=262144"),
    (["data.document_lengths=/no/such/file"], "data.document_lengths='/no/such/file': cannot be read: No such file"),
    (["model.family=other"], "model.family='other'"), (["plan.device=tpu"], "plan.device='tpu'"),
    (["--picture", "plan.pdf"], "--picture='plan.pdf': must end in .svg or .png"),
    (["--picture", ".svg"], "--picture='.svg': must end in .svg or .png"),
    (["--picture", "/dev/null/plan.svg"], "/dev/null/plan.svg': cannot be written: File exists: '/dev/null'"),
    (["--picture", "/proc/plan.png"], "--picture='/proc/plan.png': cannot be written: No such file"),
    (["--jsn"], "--jsn: no such option; see csbp plan --help")])
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, out, err = answer(capsys, "experiment=nemotron_8b_sft", *words)
    assert code == 2 and said in err and not out


@pytest.mark.parametrize(("text", "said"), [
    ("12\nabc\n", "line 2 is 'abc'"), ("5\n6\n\n0\n", "line 4 is '0'"), ("-3\n", "line 1 is '-3'"),
    ("1.5\n", "line 1"), ("\n\n", "holds no length"), ("²\n", "line 1")])
def test_lengths_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text, encoding="utf-8")
    code, _, err = answer(capsys, "experiment=nemotron_8b_sft", f"data.document_lengths={file}")
    assert code == 2 and "data.document_lengths" in err and said in err


def test_a_family_without_adapter_is_planned_and_not_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned_families()
    with pytest.raises(SystemExit) as left:
        main(["train", "experiment=nemotron_8b_sft"])
    assert left.value.code == 2
    assert "can be planned (csbp plan), but not trained yet" in capsys.readouterr().err


@pytest.mark.slow
def test_no_torch_and_no_matplotlib() -> None:
    script = ("import sys\nfrom csbp.cli import main\ntry: main(sys.argv[1:])\nfinally: print('heavy',"
              "[m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", script, "plan", "experiment=qwen3_8b_sdar", "parallel.csbp=64",
                           "data.seq_len=524288"], capture_output=True, text=True)
    assert done.returncode == 0 and "heavy []" in done.stdout, done.stderr


def test_documents_fill_the_pack_as_training_would_cut_them(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("300\n50\n700\n20\n")

    def lengths(*words: str) -> list[int]:
        return document_lengths(compose_run(["experiment=quickstart", f"data.document_lengths={file}", *words]).data)

    assert lengths("data.seq_len=1000", "data.document_tokens=1000") == [300, 50, 650]
    assert lengths("data.seq_len=2000", "data.document_tokens=256") == [256, 44, 50, 256, 256, 188, 20]
    drawn = lengths("data.seq_len=100000", "data.document_tokens=100000", "data.document_lengths=@prolong")
    assert sum(drawn) == 100000 and len(set(drawn)) > 5
    assert drawn == lengths("data.seq_len=100000", "data.document_tokens=100000", "data.document_lengths=@prolong")
    assert drawn == lengths("data.seq_len=100000", "data.document_tokens=100000", "data.document_lengths=prolong")
    with pytest.raises(ConfigError, match="did you mean @prolong"):
        lengths("data.document_lengths=@prolog")
    with pytest.raises(ConfigError, match=r"data.document_lengths=.*a document of 700 tokens, and data.long_documents"):
        lengths("data.seq_len=100", "data.document_tokens=100", "data.long_documents=error")  # not of the first pack
    assert lengths("data.seq_len=2000", "data.document_tokens=256", "data.long_documents=truncate") == [256, 50, 256,
                                                                                                      20]


def test_what_is_left_of_a_long_document_begins_the_next_pack(tmp_path: Path) -> None:
    """As training cuts it: in pieces of the same length, of which the last one in a pack is cut to fit."""
    file = tmp_path / "lengths"
    file.write_text("5000\n300\n")

    def packs(count: int, *words: str) -> list[list[int]]:
        return packs_of(compose_run(["experiment=quickstart", "data.seq_len=2000", f"data.document_lengths={file}",
                                     *words]).data, count)

    whole = "data.document_tokens=null"
    assert packs(1, whole) == [[2000]]
    assert packs(4, whole) == [[2000], [2000], [1000, 300, 700], [2000]]
    assert packs(2, "data.document_tokens=1500") == [[1500, 500], [1500, 500]]  # from tokens 0 and 3000 on
    assert packs(2, whole, "data.long_documents=truncate") == [[2000], [300, 1700]]


def test_settings_that_nothing_heeds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("experiment=quickstart", "parallel.nproc=2", "--json")
    said = "csbp: warning: cad.pool='dp', cad.ship_queries=false: nothing heeds that with cad.enabled=false; set "
    for more, expected in ((["cad.pool=dp", "cad.ship_queries=false"], said), (["cad.enabled=false"], ""),
                           (["cad.pool=dp", "cad.enabled=true"], "")):
        code, out, err = answer(capsys, *words, *more)
        assert code == 0 and json.loads(out) and (err.startswith(expected) if expected else not err), err


def test_what_a_plan_does_not_follow_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    err = answer(capsys, "experiment=quickstart", "parallel.nproc=2", "cad.overlap=none")[2]
    assert err.startswith("csbp: warning: cad.overlap=none: predictions assume cad.overlap=operator")
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [quickstart]\nparallel: {nproc: 8}\n")
    for more, said in ((["parallel.csbp=2"], "csbp: note: planned on 2 ranks, parallel.csbp x parallel.tp, not on the "
                        "parallel.nproc=8 of mine; "), (["parallel.csbp=8"], ""),
                       (["parallel.csbp=2", "parallel.nproc=4"], "")):
        code, _, err = answer(capsys, f"experiment={file}", *more)
        assert code == 0 and (err.startswith(said) if said else not err)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_the_planned_pack_is_the_trained_one(block: int) -> None:
    """A pack of supervised tokens has the same geometry."""
    lengths = [50, 7, 64]
    trained, found = make_layout(make_pack(lengths), block).geometry, whole_pack(lengths, block, noised=True)
    for name, value in vars(trained).items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)
    assert whole_pack(lengths, block, noised=False).num_noised == 0


def test_a_shipped_model_is_read_from_its_config() -> None:
    """The parameters are those of the file that training loads, norms apart."""
    from safetensors import safe_open

    config = compose_run(["experiment=quickstart"])
    shape = plan_result(config).case.shape
    with safe_open(Path(__file__).parents[2] / "models/qwen3/tiny_ar/model.safetensors", "numpy") as weights:
        sizes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    assert shape.parameters == sum(int(np.prod(size)) for size in sizes if len(size) == 2)


def test_window_layers_by_the_rules_of_transformers() -> None:
    base = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99,
            "intermediate_size": 128, "num_hidden_layers": 5, "sliding_window": 8}
    assert [part.kind.name for part in model_shape(base, "block_causal").attention] == ["full"]
    mixed = model_shape(base | {"use_sliding_window": True, "max_window_layers": 2}, "block_causal").attention
    assert [(part.kind, part.count) for part in mixed] == [
        (LayerKind("full"), 2), (LayerKind("sliding", window=8), 3)]
    experts = model_shape(base | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "absent")
    assert experts.ffn == 0
    assert experts.parameters - experts.active_parameters == 5 * 6 * 3 * 64 * 32


def test_expected_shapes_are_held_against_the_weights() -> None:
    from csbp.train.session import check_expected_shape

    check_expected_shape({"hidden_size": 8}, SimpleNamespace(hidden_size=8, canvas=1))
    with pytest.raises(ConfigError, match=r"model.shape.canvas=1: the weights' configuration has no such field"):
        check_expected_shape({"hidden_size": 8, "canvas": 1}, SimpleNamespace(hidden_size=8))
    with pytest.raises(ConfigError, match=r"model.shape.hidden_size=8: the weights have 16"):
        check_expected_shape({"hidden_size": 8}, SimpleNamespace(hidden_size=16))


def test_picture_colours_are_shares_of_rows() -> None:
    geometry = whole_pack([64, 32], 8, noised=True)
    for scheme in ("csbp", "context", "block"):
        plan = PackPlan(geometry, (LayerKind(),), 3, scheme)
        found = stripes(plan, plan.kinds[0])
        np.testing.assert_allclose(found["own"][0].sum(0), 1)  # every clean row has one owner
        np.testing.assert_allclose(found["block"][1].sum(0), 1)
        moved = sum(found["arrives"][stream].sum() for stream in (0, 1))
        assert moved == plan.traffic["full"].sum()  # a column is a row here
        assert (found["again"][0].sum() > 0) == (scheme == "block")
    runs = Runs(np.array([0]), np.array([1000]))
    assert len(shares(runs, 0, 4000)) == 720 and shares(runs, 0, 4000).mean() == pytest.approx(0.25, abs=1e-3)


def test_pictures_are_written(tmp_path: Path) -> None:
    plan = PackPlan(whole_pack([300, 100], 8, noised=True), (LayerKind(), LayerKind("near", window=16)), 3)
    for name in ("a.svg", "b.svg"):
        draw_plan(plan, tmp_path / "new" / name, title="what travels")
    text = (tmp_path / "new" / "a.svg").read_text()
    assert text == (tmp_path / "new" / "b.svg").read_text()
    for word in ("rank 2", "near layers, window 16", "rows read here, received", "what travels"):
        assert word in text
    draw_plan(plan, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
