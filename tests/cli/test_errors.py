"""Wrong input on every command: one message, the right exit code, no traceback, and nothing loaded or searched before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scrimp.cli import _clusters
from scrimp.cli._app import app
from scrimp.errors import ScrimpError
from scrimp.zoo import configs
from scrimp.zoo._settings import settings_of
from tests.cli.test_cli import _plain_wide_output, scrimp

__all__ = ["_plain_wide_output"]  # a fixture, for every test here

HUGE = str(10**30)
LONG = "9" * 5000  # more digits than Python turns into a number
MOVE = ["move", "--mesh", "x=2,y=4", "--no-peers", "[x]", "[y]"]
PLAN = ["plan", "gpt-tiny", "--cluster", "8xH100"]
PLAN_OF = ["plan", "--cluster", "8xH100"]

# What is typed, and words of the message. All of it is found out without torch.
USAGE = [
    ([*MOVE, "--shape", HUGE], "is not a whole number of 0 or more, up to 19 digits"),
    ([*MOVE, "--shape", LONG], "is not a whole number of 0 or more, up to 19 digits"),
    (["move", "--mesh", "x=2,y=4", "--shape", "99999999999,99999999999", "[x,y]", "[y,x]"],
     "less than 2 ** 63 = 9,223,372,036,854,775,808"),
    ([*MOVE, "--shape", "9223372036854775808"], "give a smaller shape"),
    (["move", "--mesh", f"x={LONG}", "--shape", "8", "[x]", "[-]"], "at most 9 digits"),
    (["move", "--mesh", "x=²", "--shape", "8", "[x]", "[-]"], "not of the form name=size"),
    (["move", "--mesh", "x=99999999", "--shape", "8", "[x]", "[-]"], "at most 1,048,576"),
    ([*MOVE, "--shape", "8", "--latency-us", "inf"], "both must be finite numbers"),
    (["clusters", f"{LONG}xH100"], "write <count>x<kind>"),
    (["clusters", "80000000xH100"], "at most 1,048,576 devices"),
    (["clusters", "8xH100", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at; make it first"),
    (["clusters", "8xH100", "--json", "."], "is a folder; give the name of a file"),
    (["diff", "no.json", "no.json"], "no.json cannot be read: No such file or directory\n"),
    (["demo", "--moves", "--steps", "20"], "--steps has no effect with --moves"),
    (["probe", "--device", "foo"], "--device foo: it is neither 'cuda' nor 'cpu'"),
    (["probe", "--device", ""], "it is neither 'cuda' nor 'cpu'"),
    (["probe", "--device", "cuda:-1"], "write cpu, cuda, or a GPU by its number, such as cuda:1"),
    (["probe", "--device", "cpu", "--disk", "/nowhere"], "--disk /nowhere: there is no such folder"),
    (["probe", "--device", "cpu", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
    (["rules", "check", "mm", "--shapes", "4*6"], "'4*6' is not a shape"),
    (["rules", "check", "mm", "--shapes", "4x6:flaot32"], "no dtype 'flaot32'; did you mean float32"),
    (["rules", "check", "mm", "--set", "=1"], "write it as name=value"),
    (["rules", "check", "mm", "--load", ""], "give the name of a Python module"),
    (["rules", "check", "mm", "--load", "..x"], "give the name of a Python module"),
    (["rules", "discover", "mm", "--load", "no_such_module"], "No module named 'no_such_module'"),
    ([*PLAN, "--out", "/nowhere/at/all.json"], "--out /nowhere/at/all.json: there is no folder /nowhere/at"),
    ([*PLAN, "--mesh", "x=16"], "mesh x=16 has 16 devices, the cluster 8"),
    ([*PLAN, "--mesh", " "], "leave out --mesh to have it searched"),
    ([*PLAN, "--memory", "lots"], "'lots' is not a size"),
    ([*PLAN, "--budget", "1GiB"], "--budget is now --memory"),
    ([*PLAN, "--seconds", "5"], "--seconds is now --time-limit"),
    ([*PLAN, "--memory", "9" * 400 + "GiB"], "below 2 ** 63 bytes"),
    ([*PLAN, "--objective", "tiem"], "did you mean 'time'?"),
    ([*PLAN, "--optimizer", "adam"], "did you mean 'adamw'?"),
    ([*PLAN, "--precision", "bf61"], "did you mean 'bf16'?"),
    ([*PLAN, "--time-limit", "inf"], "give a finite number"),
    ([*PLAN, "--stages", "²"], "it is a number of 1 or more, or 'auto'"),
    ([*PLAN, "--stages", LONG], "it is a number of 1 or more, or 'auto'"),
    ([*PLAN, "--stages", "3"], "do not divide equally"),
    ([*PLAN, "--micro-batches", "5"], "use 4 or 8"),
    ([*PLAN, "--stages", "2", "--what-if", "+1GiB"], "--what-if does not support stages"),
    ([*PLAN, "--what-if", "-1 node"], "at least one node must remain"),
    ([*PLAN, "--what-if", "more"], "'+2GiB'"),
    ([*PLAN, "--stages", "2", "--micro-batches", "4", "--interleave", "2", "--explain", "blocks.0"], "support --interleave"),
    ([*PLAN, "--seq", "64"], "for gpt-tiny write --set seq=64"),
    ([*PLAN, "--set", "layers"], "write it as name=value"),
    ([*PLAN, "--set", "layers=2", "--set", "layers=3"], "layers is set twice"),
    ([*PLAN_OF, "gpt-tinny"], "did you mean gpt-tiny"),
    ([*PLAN_OF, "nothing:here"], "there is no module 'nothing'"),
    ([*PLAN_OF, "os:"], "write module:function"),
    ([*PLAN_OF, "os:getcwd", "--batch", "4"], "--batch has no effect on os:getcwd"),
    ([*PLAN_OF, "."], "has no config.json"),
    ([*PLAN_OF, "/nowhere/config.json"], "give its folder, /nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), USAGE, ids=lambda each: None)
def test_wrong_input_is_one_message(words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = scrimp(*words, code=2)
    assert told.stdout == ""
    assert told.stderr.startswith("error: ")
    assert says in told.stderr
    assert told.stderr.count("\n") == 1


def test_wrong_input_is_found_before_torch_is_loaded(tmp_path: Path) -> None:
    """One process for all: a module that was loaded by one would be seen in those after it."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from scrimp.cli._app import app\n"
        "for words in eval(sys.stdin.read()):\n"
        "    ended = CliRunner().invoke(app, words)\n"
        "    assert ended.exit_code == 2, (words, ended.output)\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    words = repr([words for words, _ in USAGE])
    ran = subprocess.run(
        [sys.executable, "-c", code], input=words, capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


# Settings of the zoo.

WRONG = {int: ["-4", "0", "many", "1.5", HUGE, "²"], float: ["-1", "nan", "much"], bool: ["maybe", "2"], str: ["", "slow"]}


@pytest.mark.parametrize("name", [name for name in configs.PRESETS if name.endswith("tiny")])
def test_a_setting_that_is_not_possible_says_which_are(name: str) -> None:
    preset = configs.PRESETS[name]
    for key, setting in settings_of(preset).items():
        now = getattr(preset, key)
        texts = ["1,-4", "x", ""] if isinstance(now, tuple) else WRONG.get(type(now), ["anything"])
        for text in texts:
            with pytest.raises(ScrimpError) as told:
                configs.read(name, {key: text})
            assert f"{name} with {key}={text}: {key} is {setting.words}; {name} has " in str(told.value)
        wrong = -4 if isinstance(now, (int, float)) and not isinstance(now, bool) else object()
        with pytest.raises(ScrimpError, match=f"{key} cannot be .*: it is "):
            configs.config(name, **{key: wrong})


def test_settings_are_read_by_their_types() -> None:
    assert configs.read("gpt-tiny", {"layers": "3", "tie": "False", "dropout": ".5", "attention": "eager"}) == {
        "layers": 3, "tie": False, "dropout": 0.5, "attention": "eager",
    }  # fmt: skip
    assert configs.read("resnet-tiny", {"stages": "2,1"}) == {"stages": (2, 1)}
    assert configs.read("vgg-tiny", {"stages": "8/16,16"}) == {"stages": ((8,), (16, 16))}
    with pytest.raises(ScrimpError, match=r"gpt-tiny with heads=5: dim 32 is not a multiple of heads 5"):
        configs.read("gpt-tiny", {"heads": "5"})
    with pytest.raises(ScrimpError, match=r"has no setting layer; it has .*; did you mean layers"):
        configs.read("gpt-tiny", {"layer": "5"})


def test_names_to_explain_are_checked_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from scrimp.cli import _plan

    def search(*words: object, **settings: object) -> None:
        raise AssertionError("it searched")

    monkeypatch.setattr(_plan, "plan", search)
    for name, says in (
        ("blocks.0.mlpp", "has no weight, module or layer 'blocks.0.mlpp'; did you mean blocks.0.mlp,"),
        ("blocks.7", "did you mean blocks.1"),
        ("blocks", "it is a list of 2 modules; name one, blocks.0 to blocks.1"),
        ("", "there are embed"),
    ):
        assert says in scrimp("plan", "gpt-tiny", "--cluster", "4xCPU", "--explain", name, code=2).stderr


@pytest.mark.parametrize(
    "text", ["[]", "null", "{", '{"format": "scrimp.plan", "version": 2}', '{"format": "scrimp.plan", "version": 2, "mesh": 3}']
)
def test_files_that_are_no_plans(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert f"{file}: this is not a plan file of scrimp" in scrimp("diff", str(file), str(file), code=2).stderr


def test_a_plan_of_the_first_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"format": "scrimp.plan", "version": 1}')
    assert "plan again with scrimp.plan or `scrimp plan`" in scrimp("diff", str(file), str(file), code=2).stderr


def test_modules_that_fail_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for k, (body, says) in enumerate(
        (
            ("raise KeyError('q')", "KeyError: 'q'"),
            ("import sys; sys.exit(3)", "sys.exit(3)"),
            ("def (", "SyntaxError"),
            ("f = 3", "int"),
        )
    ):
        name = f"scrimp_wrong_{k}"
        (tmp_path / f"{name}.py").write_text(body)
        assert says in scrimp("plan", f"{name}:f", "--cluster", "2xCPU", code=2).stderr
        if body != "f = 3":
            assert says in scrimp("rules", "check", "mm", "--load", name, code=2).stderr


def test_a_rule_that_is_not_for_larger_sizes_is_said() -> None:
    assert "the rule is not for them" in scrimp("rules", "discover", "aten.split.Tensor").output


# How commands end.


def test_a_bug_is_one_line_and_the_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(console: object, **settings: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr(_clusters, "show", broken)
    told = scrimp("clusters", code=70)
    assert told.stderr.startswith("this is a bug in scrimp, not in what you typed: ValueError: two lines; ")
    assert "SCRIMP_DEBUG=1" in told.stderr
    assert told.stderr.count("\n") == 1
    monkeypatch.setenv("SCRIMP_DEBUG", "1")
    told = scrimp("clusters", code=70)
    assert "Traceback" in told.stderr
    assert "test_errors.py" in told.stderr


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (MemoryError(), 1, "error: this machine ran out of memory; use smaller sizes, or a machine with more\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (ScrimpError("it failed"), 1, "error: it failed\n"),
    ],
)
def test_what_ends_the_work(error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(console: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(_clusters, "show", ends)
    assert scrimp("clusters", code=code).stderr == says


def test_what_the_parser_refuses_is_left_to_it() -> None:
    for words in (["plan"], ["nothing"], ["demo", "--steps", "9"], [*PLAN, "--batch", "0"], [*PLAN, "--gap", "2"]):
        told = CliRunner().invoke(app, words)
        assert told.exit_code == 2
        assert "Usage: " in told.stderr
        assert "Traceback" not in told.output


def test_ctrl_c_ends_a_process() -> None:
    code = (
        "import signal, time, scrimp.cli, scrimp.cli._clusters as command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a process in the background ignores
        "command.show = lambda console, **settings: (print('began', flush=True), time.sleep(60))\n"
        "scrimp.cli.main()\n"
    )
    command = [sys.executable, "-c", code, "clusters"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "began\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == "interrupted\n"


def test_a_reader_that_left_is_no_bug() -> None:
    ran = subprocess.run(
        f"{sys.executable} -c 'import scrimp.cli; scrimp.cli.main()' clusters | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "bug" not in ran.stderr
    assert "Traceback" not in ran.stderr
