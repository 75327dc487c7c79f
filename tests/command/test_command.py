"""The command rmm-linear: help at once, version, explain, fit, and what is refused."""

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch
from helpers import tiny_model, token_ids
from transformers import RobertaForMultipleChoice, T5Config, T5ForConditionalGeneration

from glue_finetune import __main__ as start
from rmm_linear import RMMConfig, __version__
from rmm_linear.backends.native import library
from rmm_linear.command.known_models import KNOWN, known
from rmm_linear.command.main import main
from rmm_linear.command.methods import for_training
from rmm_linear.command.models import model_on_meta
from rmm_linear.planning import BlockPlan, load_plan


def python(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env={**os.environ})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    for name in ("roberta", "llama", "vit"):
        tiny_model(name).save_pretrained(place / name)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(place / "t5")  # without decoder_start_token_id
    settings = json.loads((place / "t5" / "config.json").read_text())
    (place / "t5" / "config.json").write_text(json.dumps({**settings, "decoder_start_token_id": None}))
    (place / "text.pt").write_text("hello text\n")
    (place / "path.pt").write_bytes(pickle.dumps({"input_ids": place}, protocol=2))
    torch.save({"foo": 1}, place / "foo.pt")
    return place


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        *(([], "torch"), (["doctor"], "torch"), (["fit"], "torch"), (["simulate"], "torch")),
        (["glue"], "transformers"),
    ],
)
def test_help_imports_nothing_that_takes_seconds(words, heavy):
    code = "import sys; from rmm_linear.command.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    status, out, err = python("-c", f"{code}assert {heavy!r} not in sys.modules", *words, "--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: ")


def test_the_module_and_the_command_are_the_same():
    status, out, _ = python("-m", "rmm_linear", "version")
    assert status == 0
    assert re.search(rf"^rmm_linear +{re.escape(__version__)}$", out, flags=re.M)
    (entry,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "rmm-linear"]
    assert entry.load() is main


@pytest.fixture
def no_library(monkeypatch):
    """Look for the C library again, and find what the test says."""
    library._load.cache_clear()
    with monkeypatch.context() as hidden:
        yield lambda spec: hidden.setattr(importlib.util, "find_spec", lambda name: spec)
    library._load.cache_clear()


def test_version_says_what_a_bug_report_needs(capsys):
    assert main(["version"]) == 0
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == torch.__version__
    assert {"python", "system", "CPU backend", "GPU backend", "GPU", "RMM_BACKEND"} <= lines.keys()
    assert re.match(r"C library, for (AVX-512|AVX2|any processor)$|plain PyTorch\. ", lines["CPU backend"])


@pytest.mark.parametrize("spec", [None, importlib.machinery.ModuleSpec("library", None, origin="/no/library.so")])
def test_version_says_once_why_there_is_no_library(spec, no_library, capsys, caplog):
    no_library(spec)
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert "CPU backend   plain PyTorch. " in out
    assert out.count("The C library was not built" if spec is None else "/no/library.so cannot be loaded") == 1
    assert not caplog.messages
    assert library.logger.propagate


def test_without_the_library_it_is_said_once(no_library, caplog):
    no_library(None)
    assert [library.is_available() for _ in range(3)] == [False] * 3
    assert caplog.messages == [library.MISSING]


@pytest.mark.parametrize("name", ["roberta", "llama"])
def test_explain_prints_totals_operations_and_layers(name, folders, capsys):
    assert main(["explain", str(folders / name), "--size", "4", "--length", "30"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rmm_linear: saved_before=")
    found = re.search(r"^saved for backward: ([\d.]+) → ([\d.]+) MiB \(\d+%\): linear \d+%, ", out, re.M)
    assert float(found[1]) > float(found[2])
    assert "| operation " in out
    assert "| layer " in out


def test_explain_takes_a_batch_a_configuration_and_operations(folders, tmp_path, capsys):
    torch.save({"input_ids": token_ids(), "labels": torch.zeros(4, dtype=torch.long)}, tmp_path / "batch.pt")
    RMMConfig(min_rows=4, ratio=0.25).save(tmp_path / "config.json")
    words = ["explain", str(folders / "roberta"), "--batch", str(tmp_path / "batch.pt")]
    assert main([*words, "--rmm_config", str(tmp_path / "config.json"), "--operations", "linear", "norm"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"linear \d%, norm \d%, other (\d+)%", out)
    assert re.search(r"^hint: operations lacks attention: \d+% stays, add 'attention' to operations$", out, re.M)


FIT = ["{}/roberta", "--size", "8", "--length", "16", "--memory"]
EXPLAIN = ["{}/roberta", "--batch"]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("explain", ["/nowhere"], "MODEL must be a folder written by save_pretrained"),
        ("explain", ["{}/vit"], "takes pixel_values. Save a batch"),
        ("explain", ["{}/roberta", "--length", "50"], "is out of the model's range (index"),
        ("explain", ["{}/roberta", "--size", "0"], "size must be at least 1, got 0"),
        ("explain", ["{}/roberta", "--operations", "lines"], "operations must be one or more of linear, activation"),
        ("explain", [*EXPLAIN, "{}/none.pt"], "must be a .pt file written by torch.save, got none (No such file or"),
        ("explain", [*EXPLAIN, "{}/text.pt"], "written by torch.save, got another (KeyError). Save one with"),
        ("explain", [*EXPLAIN, "{}/path.pt"], "more in it than dictionaries, lists and tensors. Save one"),
        ("explain", [*EXPLAIN, "{}/foo.pt"], "ForSequenceClassification takes input_ids, attention_mask, "),
        ("explain", ["{}/t5", "--length", "30"], "The model does not take this batch: "),
        ("explain", ["{}/roberta", "--rmm_config", "{}/none.json"], "none.json"),
        ("fit", ["/nowhere", "--memory", "1GB"], "MODEL must be a folder written by save_pretrained"),
        ("fit", FIT[:-1], "Give --memory 8GB, or --time 1.2"),
        ("fit", [*FIT, "10KB"], "memory='10KB' cannot be met"),
        ("fit", [*FIT, "1.5"], "memory as a share must be in (0, 1], or (0 %, 100 %], got '1.5'"),
        ("fit", [*FIT, "1GB", "--allow", "recomput"], "Did you mean 'recompute'"),
        ("fit", [*FIT, "1GB", "--max-noise", "0"], "max_noise must be positive"),
        ("fit", [*FIT, "1GB", "--length", "900"], "Give a smaller --length."),
        ("fit", [*FIT, "1GB", "--size", "0"], "size must be"),
        ("fit", [*FIT, "1GB", "--rank", "0"], "rank must be"),
        ("fit", [*FIT, "1GB", "--save", "/dev/null/folder/plan.json"], "/dev/null/folder"),
        ("longest", ["/nowhere", "--memory", "1GB"], "MODEL must be a folder written by save_pretrained"),
        ("longest", ["llama-3.1-8b", "--memory", "8 gigs"], "memory must be a size"),
        ("longest", ["llama-3.1-8b", "--memory", "0.5"], "memory must be"),
        ("longest", ["llama-3.1-8b", "--memory", "8GB", "--rank", "0"], "rank must be at least 1"),
        ("longest", ["{}/vit", "--memory", "8GB"], "takes pixel_values"),
        ("simulate", ["/nowhere"], "MODEL must be a folder written by save_pretrained"),
        ("simulate", ["roberta-base", "--memory", "0.5"], "memory must be bytes or a text"),
        ("simulate", ["roberta-base", "--length", "900"], "length must be at most 512"),
        ("simulate", ["{}/t5", "--length", "30"], "The model does not take this batch: "),
        ("variance", ["model", "batch", "--plot", "/none/noise.png"], "--plot must be"),
        ("glue", ["--demo"], "not installed: no_such_package, nor_this. Run pip install 'rmm_linear[glue]'"),
    ],
)
def test_what_is_refused_is_one_line_and_status_2(command, words, message, folders, capsys, monkeypatch):
    monkeypatch.setattr(start, "_NEEDED", ("torch", "no_such_package", "nor_this"))
    assert main([command, *[word.format(folders) for word in words]]) == 2
    out, err = capsys.readouterr()
    assert out == "" or "--save" in words
    assert err.count("\n") == 1
    assert message in err
    assert command == "glue" or err.startswith(f"rmm-linear {command}: error: ")


@pytest.fixture
def no_hub(monkeypatch):
    def get_session():
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.utils.get_session", get_session)


@pytest.mark.parametrize("command", ["doctor", "explain", "fit", "longest", "simulate"])
def test_without_the_hub_a_name_is_answered_at_once_with_those_that_are_known(command, no_hub, capsys):
    assert main([command, "meta-llama/Llama3.1-8b", "--memory=1GB"][: 3 if command in ("fit", "longest") else 2]) == 2
    err = capsys.readouterr().err
    assert re.search("it is not in the cache, and https?://.* does not answer .no network.", err)
    assert f"there are {', '.join(KNOWN)}. Did you mean 'llama-3.1-8b'?" in err


def test_names_of_the_hub_and_in_any_case_are_known():
    assert known("meta-llama/Llama-3.1-8B-Instruct") == known("Llama-3.1-8B") == KNOWN["llama-3.1-8b"]
    assert {known(name) is None for name in ("llama", "other/llama-3.1-8b")} == {True}


def test_weights_that_have_no_place_are_not_made(folders, monkeypatch, capsys):
    monkeypatch.setattr("rmm_linear.command.models.memory_of_host", lambda: 1000)
    assert main(["explain", str(folders / "roberta")]) == 2
    assert "of 0.98 KiB that this machine has for them. rmm-linear doctor, fit and longest" in capsys.readouterr().err


def test_explain_makes_labels_of_several_classes_and_refuses_several_texts(tmp_path, capsys):
    model = tiny_model("roberta")
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path / "labels")
    assert main(["explain", str(tmp_path / "labels"), "--length", "30"]) == 0
    RobertaForMultipleChoice(model.config).save_pretrained(tmp_path / "texts")
    assert main(["explain", str(tmp_path / "texts"), "--length", "30"]) == 2
    assert "takes several texts per example. Save a batch" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["explian", "glu", "varaince"])
def test_a_command_that_is_nearly_known(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([word, "x"])
    assert (
        f"must be one of doctor, explain, fit, longest, simulate, variance, glue, version, got '{word}'. Did you"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "flag"),
    [(["fit", "roberta-base", "--memroy", "8GB"], "memory"), (["doctor", "x", "--lenght=9"], "length")],
)
def test_a_flag_that_is_nearly_known(words, flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    err = capsys.readouterr().err
    assert f"error: unrecognized arguments: {' '.join(words[2:])}. Did you mean '--{flag}'?" in err


def test_adapters_that_are_asked_for_by_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "roberta-base", "--lora", "8"])
    assert "unrecognized arguments: --lora. Did you mean '--method lora'?" in capsys.readouterr().err


def test_help_all_is_the_help_of_all_commands(capsys):
    assert main(["--help-all"]) == 0
    out = capsys.readouterr().out
    assert [word for word in ("--batch FILE", "--learning_rate", "--task_name") if word not in out] == []
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--help-all" in capsys.readouterr().out


def test_variance_shows_its_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["variance", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("usage: rmm-linear variance ")
    assert out.count("(default: ") == 12
    assert "(default: 0.05 0.1 0.2)" in out


def test_all_flags_of_glue_are_in_its_long_help_and_ours_in_the_short_one(capsys):
    assert main(["glue", "--help"]) == 0
    short = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["glue", "--help-all"])
    long = capsys.readouterr().out
    ours = {flag for flag in re.findall(r"^  (--\w+)", short, flags=re.M)}
    assert {"--task_name", "--compare", "--kind", "--operations", "--output_dir"} <= ours
    assert "--adam_beta1" not in short
    assert "--adam_beta1" in long
    assert all(flag in long for flag in ours)
    assert "(default: countsketch)" in short


# fit

BATCH = ["--size", "8", "--length", "16"]
RECOMPUTED = ["--allow", "keep", "recompute"]


def fitted(capsys, folders, *words):
    capsys.readouterr()
    assert main(["fit", str(folders / "roberta"), *words]) == 0
    return capsys.readouterr().out


def test_the_report_is_printed_and_the_plan_saved(folders, tmp_path, capsys):
    path = tmp_path / "plan.json"
    out = fitted(capsys, folders, *BATCH, "--memory", "0.8", *RECOMPUTED, "--save", str(path))
    assert out.startswith("rmm_linear fit: ")
    assert "of which optimizer " in out
    plan = load_plan(path)
    assert any(block.choice != "keep" for block in plan.blocks)
    trained = tiny_model("roberta")
    plan.apply(trained)
    trained(input_ids=token_ids(4, 20), labels=torch.zeros(4, dtype=torch.long)).loss.backward()


def test_a_batch_of_a_file_and_an_optimizer_without_state(folders, tmp_path, capsys):
    ids = token_ids(4, 20)
    torch.save({"input_ids": ids, "labels": ids[:, 0] % 2}, tmp_path / "batch.pt")
    words = ["--batch", str(tmp_path / "batch.pt"), "--memory", "1GB", "--optimizer", "sgd", "--max-noise", "2"]
    out = fitted(capsys, folders, *words)
    assert "The exact model fits" in out
    assert "of which optimizer " not in out


@pytest.mark.thorough
def test_adapters_on_weights_in_4_bits_are_fitted(folders, capsys):
    words = ["fit", str(folders / "llama"), *BATCH, "--method", "qlora", "--rank", "2", "--memory", "60%", *RECOMPUTED]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Names begin with base_model.model." in out
    assert "recompute" in out


def test_time_bounds_alone(folders, capsys):
    out = fitted(capsys, folders, *BATCH, "--time", "100", *RECOMPUTED)
    assert any(f" {choice}=" in out for choice in ("recompute", "selective", "nested"))
    assert "budget=" not in out


# simulate


def test_simulate_prints_the_peak_and_its_json_with_ways_out(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rmm_linear.fitting.ways.WaySearch._fitted", lambda self: None)  # most of the time
    words = ["simulate", str(folders / "llama"), "--size", "4", "--length", "32", "--no-progress"]
    assert main([*words, "--method", "lora", "--adapters", "float32", "--rank", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("rmm_linear simulate: peak=")
    assert "layers with LoRA" in out
    assert "The largest tensors:" in out
    assert main([*words, "--json", "--memory", "1GB"]) == 0
    peak = json.loads(capsys.readouterr().out)
    assert peak["peak"] == sum(peak["parts"].values())
    assert (peak["memory"], peak["fits"], peak["ways"], peak["length"]) == (10**9, True, [], 32)
    assert main([*words, "--json", "--memory", str(peak["peak"] * 3 // 4)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["ways"][0]["fits"]
    keys = {"model", "method", "optimizer", "size", "length", "memory", "fits", "peak", "moment", "parts", "passes"}
    keys |= {"static", "by_kind", "by_module", "alive", "largest", "ways", "notes"}
    assert found.keys() == peak.keys() == keys
    ids = token_ids(4, 20)
    torch.save({"input_ids": ids, "labels": ids[:, 0] % 2}, tmp_path / "batch.pt")
    assert main(["simulate", str(folders / "roberta"), "--batch", str(tmp_path / "batch.pt")]) == 0
    assert "Batch 4 × 20; optimizer: AdamW." in capsys.readouterr().out


# longest


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("qwen3-8b", 8.19),
        ("gpt-oss-20b", 20.91),
        ("roberta-base", 0.1247),
    ],
)
def test_known_models_have_their_published_sizes(name, billions):
    model = model_on_meta(name)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=1e-3)
    assert {(p.dtype, p.is_meta) for p in model.parameters()} == {(torch.bfloat16, True)}


@pytest.mark.parametrize(("method", "adapters"), [("lora", "float32"), ("qlora", "bfloat16"), ("full", "bfloat16")])
def test_methods_train_adapters_or_all_weights(method, adapters, folders):
    base = model_on_meta(str(folders / "llama"))
    size = sum(p.nbytes for p in base.parameters())
    model = for_training(base, method, rank=2, dtype=adapters)
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    if method == "full":
        assert len(trained) == len([*model.parameters()])
    else:
        assert trained
        assert all("lora_" in name and str(dtype) == f"torch.{adapters}" for name, dtype in trained.items())
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert (frozen < size, frozen == size) == {"full": (True, False), "lora": (False, True), "qlora": (True, False)}[
        method
    ]


def test_adapters_without_peft_say_what_to_install(folders, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(["longest", str(folders / "llama"), "--memory", "1GB"]) == 2
    assert "--method lora needs PEFT, which is not installed. Run pip install peft." in capsys.readouterr().err


def test_longest_prints_json_and_saves_the_plan(folders, tmp_path, capsys):
    path = tmp_path / "plan.json"
    words = ["longest", str(folders / "roberta"), "--memory", "20MB", "--method", "full", "--batch-size", "2"]
    assert main([*words, "--optimizer", "sgd", "--multiple", "4", "--json", "--save", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["method"], found["binds"]) == (str(folders / "roberta"), "full", "positions")
    assert found["tokens"] == 2 * found["length"] == 2 * 36
    assert found["peak"] <= found["memory"] == 20 * 10**6
    assert json.loads(path.read_text()) == found["plan"]
    assert isinstance(load_plan(path), BlockPlan)


def test_longest_says_what_is_trained_and_that_nothing_fits(folders, capsys):
    assert main(["longest", str(folders / "roberta"), "--memory", "1GB", "--rank", "4", "--multiple", "4"]) == 0
    out = capsys.readouterr().out
    assert "What binds: positions." in out
    assert "LoRA of rank 4 on all linear layers but the head, in bfloat16; frozen weights in bfloat16." in out
    words = ["longest", str(folders / "roberta"), "--memory", "1KB", "--method", "full", "--multiple", "4"]
    assert main([*words, "--ranks", "8"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "What binds: optimizer step." in out
    assert "Divided among devices: Shards(ranks=8)." in out
