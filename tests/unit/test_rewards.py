"""Reward functions in real worker processes: values, arguments, failures, limits, and the end of the processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from trl.rewards import get_soft_overlong_punishment, think_format_reward

from components.config.schema.rollouts import RewardFunctionsConfig
from components.data.preflight import check_reward_functions
from components.protocol.errors import ConfigError
from components.training.rewards import RewardFunctions, Scored

WAIT_SECONDS = 20.0


def columns(count: int, answer: Any = "4", **others: list[Any]) -> dict[str, list[Any]]:
    """Return the columns of `count` answers; `answer`: one value for all, or a list."""
    return {
        "prompts": [f"prompt {i}" for i in range(count)],
        "answer": answer if isinstance(answer, list) else [answer] * count,
        "token_ids": [[*range(i + 1)] for i in range(count)],
        "stopped": [i % 2 == 0 for i in range(count)],
        **others,
    }


class Functions:
    """Files with functions in the current directory, and their workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.open = folder, list[RewardFunctions]()

    def write(self, code: str, name: str = "rewards.py") -> None:
        (self.folder / name).write_text(textwrap.dedent(code))

    def start(self, *names: str, **options: Any) -> RewardFunctions:
        cfg = RewardFunctionsConfig(functions=list(names or ["rewards.py:score"]), **options)
        self.open.append(RewardFunctions(cfg, max_new_tokens=10))
        return self.open[-1]

    def score(self, code: str, answers: list[str], data: dict[str, list[Any]] | None = None, **options: Any) -> Scored:
        """Return what the function `score` of `code` returns for `answers`."""
        self.write(code)
        return self.start(**options).score(answers, data or columns(len(answers)), step=3)

    def saved_pid(self, name: str = "pid") -> int:
        """Return the process id that a function has written to a file."""
        until = time.monotonic() + WAIT_SECONDS
        while not (text := (self.folder / name).read_text() if (self.folder / name).exists() else ""):
            assert time.monotonic() < until
            time.sleep(0.01)
        return int(text)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Functions]:
    monkeypatch.chdir(tmp_path)
    created = Functions(tmp_path)
    yield created
    for each in created.open:
        each.__exit__()


def ends_within(pid: int, seconds: float) -> bool:
    """Return whether a process has ended, or is a zombie, at most `seconds` from now."""
    until = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX" or time.monotonic() > until:
            return state in "ZX"
        time.sleep(0.01)


NUMBERS = [  # answer, the data's answer, reward by gsm8k, reward by number
    ("It is 4.", "4", 1, 1),
    ("#### 4", "2 + 2 = <<2+2=4>>4\n#### 4", 1, 1),
    ("####4 apples of 7", "4", 1, 0),
    ("####\n4", "4", 1, 1),
    ("#### 42\n\n#### 43", "#### 43", 1, 1),
    ("#### 42\n\n#### 43", "#### 42", 0, 0),
    ("#### 4\nAnd now for 5", "4", 1, 0),
    ("#### Step 1\nso 2 + 2 = 4", "4", 1, 1),  # a heading of Markdown
    ("#### 4 #### none", "4", 1, 1),
    ("$1,234.50.", "#### 1234.5", 1, 1),
    ("#### $1,234.50", 1234.5, 1, 1),
    ("#### -$1,234", "-1234", 1, 1),
    ("#### $-12", -12, 1, 1),
    ("-3", "#### -3", 1, 1),
    ("\u22123", "-3", 1, 1),
    ("-3", "3", 0, 0),
    ("7-3", "3", 1, 1),  # an operator
    ("3 - 7 = -4", "-4", 1, 1),
    ("x=-4", "-4", 1, 1),
    ("3.0", "3", 1, 1),
    (".5", "0.50", 1, 1),
    ("0.1", 0.1, 1, 1),
    ("0.30000000000000001", "0.3", 0, 0),  # equal as floats
    ("1e3", "1000", 1, 1),
    ("1E-3", "0.001", 1, 1),
    ("1e1000", "1000", 1, 1),  # no exponent: two numbers
    ("12%", "12", 1, 1),
    ("12 %", "12%", 1, 1),
    ("1,000,000", "1000000", 1, 1),
    ("\\boxed{18}", "18", 1, 1),
    ("\u0664", "4", 0, 0),  # digits of another script
    ("No number", "4", 0, 0),
    ("", "4", 0, 0),
    ("9" * 5000, "4", 0, 0),  # more digits than Python converts
    ("4", None, None, None),
    ("No number", "", None, None),
]


def test_numbers_are_compared_exactly(functions: Functions) -> None:
    answers, expected = [case[0] for case in NUMBERS], [case[1] for case in NUMBERS]
    started = functions.start("gsm8k", "number")
    assert started.score([], columns(0), 0) == Scored([[], []], 0, "")
    scored = started.score(answers, columns(len(answers), expected), 0)
    assert list(zip(answers, expected, *scored.rewards, strict=True)) == NUMBERS
    assert (scored.failed, scored.failure) == (0, "")


def test_text_patterns_and_length(functions: Functions) -> None:
    answers = [" yes\n", "yes, 4", "<think>a\nb</think> <answer>4</answer>", "<answer>4</answer>", "a 4\n", ""]
    data = columns(6, ["yes ", "yes", None, 4, "4", ""])
    captured = functions.start("exact", "format", "length", "regex", pattern=r"^<answer>\s*(.+?)\s*</answer>|^a (\d)")
    assert captured.score(answers, data, 0).rewards == [
        [1, 0, None, 0, 0, 1],
        [0, 0, 1, 0, 0, 0],
        [0.9, 0.8, 0.7, 0.6, 0.5, 0.4],
        [0, 0, None, 1, 0, 0],  # a first group without a match is no answer, not even an empty one
    ]
    found = functions.start("regex", pattern="a.b|yes")
    assert found.score([*answers, "a\nb", "axb"], columns(8, None), 0).rewards == [[1, 1, 0, 0, 0, 0, 0, 1]]


def test_data_without_an_answer_column_is_a_config_error(functions: Functions) -> None:
    data = columns(1)
    del data["answer"]
    with pytest.raises(ConfigError, match=r"functions=gsm8k: requires the argument answer; .*set data.answer_column"):
        functions.start("gsm8k").score(["4"], data, 0)


ARGUMENTS = {  # parameters, what the function returns, the reward
    "answers, *, prompts, answer, step": ("len(answers[0] + prompts[0] + answer[0]) + step", 13),
    "texts, stopped=None, other=7": ("other + stopped[0]", 8),
    "text": ("text[0] == 'a'", 1),  # the answers, not the column of this name
    "text, **rest": ("len(rest)", 7),
    "*texts, level, **rest": ("len(texts) * level[0]", 5),
    "answers, /, level": ("level[0]", 5),
    "level, answers": ("level[0] + len(answers[0])", 6),
    "*, token_ids": ("len(token_ids[0])", 1),
    "answers, date": ("date == ['2026-01-02']", 1),
    "answers, torch=False": ("len(set(sys.modules) & {'torch', 'numpy', 'transformers'})", 0),
    "answers, ranks=False": ("len({'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'} & set(os.environ))", 0),
    "answers, gpus=False": ("(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']) == ('', '1')", 1),
}


def test_functions_receive_the_arguments_that_they_take(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code = [f"def f{i}({parameters}): return [{body}]" for i, (parameters, (body, _)) in enumerate(ARGUMENTS.items())]
    code += ["class Level:", "    def __call__(self, answers, level): return level", "f12 = Level()"]
    code += ["f13 = functools.partial(lambda answers, bonus: [bonus], bonus=9)"]
    functions.write("\n".join(["import functools, os, sys", *code]))
    started = functions.start(*(f"rewards.py:f{i}" for i in range(14)))
    data = columns(1, level=[5], text=["other"], date=[date(2026, 1, 2)])
    rewards = [rewards[0] for rewards in started.score(["a"], data, step=3).rewards]
    assert dict(zip(ARGUMENTS, rewards, strict=False)) == {key: reward for key, (_, reward) in ARGUMENTS.items()}
    assert rewards[12:] == [5, 9]


NO_FUNCTIONS = {
    "def score(answers, levle): return [1]": "requires the argument levle; must be one of prompts, answer",
    "def score(a, b, /): return [1]": "requires the argument b;",
    "def score(prompts, step): return [1]": "its first parameter, prompts, would receive the answers",
    "score = 5": "score: is a int; must be a function",
    "def other(answers): return [1]": "has no attribute 'score'",
    "import absent_module": "No module named 'absent_module'",
    "import os\nos._exit(3)": "cannot be loaded: its worker process ended with exit status 3",
    "import sys\nsys.exit('no')": "SystemExit: no",
}


@pytest.mark.parametrize(("code", "message"), NO_FUNCTIONS.items())
def test_functions_that_cannot_be_called_are_config_errors(functions: Functions, code: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        functions.score(code, ["a"])


def test_modules_and_files_are_found_from_the_current_directory(functions: Functions) -> None:
    (functions.folder / "mine" / "deep").mkdir(parents=True)
    functions.write("class Judge:\n    @staticmethod\n    def one(answers): return [1] * len(answers)", "mine/judge.py")
    file = "import re, mine.judge\nopen('loads', 'a').write('.')\ndef two(answers): return [2] * len(answers)"
    functions.write(file, "mine/deep/re.py")
    functions.write("raise SystemExit('a module of the current directory replaced one of Meshbook')", "components.py")
    path = f"{functions.folder}/mine/deep/re.py:two"
    scored = functions.start("mine.judge:Judge.one", "mine/deep/re.py:two", path).score(["a", "b"], columns(2), 0)
    assert scored == Scored([[1, 1], [2, 2], [2, 2]], 0, "")
    assert (functions.folder / "loads").read_text() == "."


def test_functions_of_trl_are_called_as_trl_calls_them(functions: Functions) -> None:
    """Compare with the call in `GRPOTrainer._calculate_rewards`, for texts and for conversations."""
    functions.write("""
        from trl.rewards import get_soft_overlong_punishment
        overlong = get_soft_overlong_punishment(4, 2)
        def everything(prompts, completions, completion_ids, level, **kwargs):
            return [len(repr(each)) for each in zip(prompts, completions, completion_ids, level)]
        def keywords(**kwargs):
            return everything(**kwargs)
    """)
    answers = ["<think>a</think>b", "<think>a", "x", "y"]
    conversations = [[{"role": "user", "content": f"{i}?"}] for i in range(4)]
    messages = [[{"role": "assistant", "content": answer}] for answer in answers]
    data = columns(4, level=[1, 2, 3, 4])
    started = functions.start("rewards.py:everything", "rewards.py:keywords", "rewards.py:overlong")
    for prompts, completions in ((data["prompts"], answers), (conversations, messages)):
        call = {"prompts": prompts, "completions": completions, "completion_ids": data["token_ids"]}
        call["level"] = data["level"]
        every = [len(repr(each)) for each in zip(*call.values(), strict=True)]
        overlong = get_soft_overlong_punishment(4, 2)(**call)
        scored = started.score(answers, data | {"prompts": prompts}, 0)
        assert scored == Scored([every, every, overlong], 0, "")
        assert overlong == [0, 0, -0.5, -1]
    scored = functions.start("trl.rewards:think_format_reward").score(answers, data | {"prompts": conversations}, 0)
    assert scored == Scored([think_format_reward(messages)], 0, "")
    assert scored.rewards == [[1, 0, 0, 0]]


def test_none_and_nan_are_no_reward_and_bool_counts_as_number(functions: Functions) -> None:
    functions.write("""
        from fractions import Fraction
        import numpy
        VALUES = [None, float("nan"), True, False, 3, -0.5, Fraction(1, 2), numpy.float32(0.25), numpy.bool_(True)]
        def score(answers):
            return VALUES
        def array(answers):
            return numpy.array([1.5, numpy.nan] + [0] * 7, numpy.float32)
    """)
    scored = functions.start("rewards.py:score", "rewards.py:array").score(["a"] * 9, columns(9), 0)
    assert scored == Scored([[None, None, 1, 0, 3, -0.5, 0.5, 0.25, 1], [1.5, None, *[0] * 7]], 0, "")


NO_REWARDS = {
    "[1.0, float('inf')]": "returned inf; must return a list with a finite number, or None",
    "[float('-inf'), 1]": "returned -inf;",
    "[10**400, 1]": "returned 1000",
    "['1', 1]": "returned '1';",
    "[1j, 1]": "returned 1j;",
    "[1]": "returned 1 values for 2 answers;",
    "[1, 2, 3]": "returned 3 values for 2 answers;",
    "None": "returned a value of type NoneType;",
    "1.0": "returned a value of type float;",
    "{1: 2, 3: 4}": "returned a value of type dict;",
    "[1 / (2 - len(answers))] * 2": "returned 2 values for 1 answers;",  # fails for both, not for one
}


@pytest.mark.parametrize(("returned", "message"), NO_REWARDS.items())
def test_other_values_are_config_errors(functions: Functions, returned: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.functions=rewards.py:score: {message}"):
        functions.score(f"def score(answers): return {returned}", ["a", "b"])


def test_any_text_reaches_the_function_and_its_prints_reach_stderr(
    functions: Functions, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = ["\ud800 half", "\U0001f600\u0000\n\r\u2028", "a" * 300_000]
    code = """
        import os, sys
        def score(answers, expected):
            print(answers[0], flush=True)
            os.write(1, b'{"rewards": [9, 9, 9]}\\n')
            assert sys.stdin.read() == "" and os.read(0, 9) == b""
            return [a == e for a, e in zip(answers, expected)]
    """
    assert functions.score(code, answers, columns(3, expected=answers)) == Scored([[1, 1, 1]], 0, "")
    assert tuple(capfd.readouterr()) == ("", '\\ud800 half\n{"rewards": [9, 9, 9]}\n')


FAILURES = {
    "raise ValueError('of mine')": "line 5, in score\n    raise ValueError('of mine')\nValueError: of mine",
    "sys.exit(4)": "SystemExit: 4",
    "os._exit(1)": ": its worker process ended with exit status 1",
    "os.kill(os.getpid(), 9)": ": its worker process was killed by signal 9",
}


@pytest.mark.parametrize("statement", FAILURES)
def test_only_the_answers_that_fail_get_no_reward(functions: Functions, statement: str) -> None:
    functions.write(f"""
        import os, sys
        def score(answers):
            if "bad" in answers:
                {statement}
            return [1.0] * len(answers)
        def fine(answers):
            return [2.0] * len(answers)
    """)
    answers = ["bad" if i == 5 else "good" for i in range(8)]
    started = functions.start("rewards.py:score", "rewards.py:fine")
    for _ in range(2):
        scored = started.score(answers, columns(8), 0)
        assert scored.rewards == [[1, 1, 1, 1, 1, None, 1, 1], [2] * 8]
        assert scored.failed == 1
        assert scored.failure.startswith("reward.functions=rewards.py:score: ")
        assert scored.failure.endswith(FAILURES[statement])
        assert "components" not in scored.failure
    assert started.score(["bad"], columns(1), 0).rewards == [[None], [2]]


def test_an_answer_that_fails_in_two_functions_counts_once(functions: Functions) -> None:
    functions.write("score = second = lambda answers: [1 / len(answer) for answer in answers]")
    scored = functions.start("rewards.py:score", "rewards.py:second").score(["", "ab", ""], columns(3), 0)
    assert scored.rewards == [[None, 0.5, None]] * 2
    assert scored.failed == 2
    assert "ZeroDivisionError" in scored.failure


HANGS = ["time.sleep(1000)", "while True: pass", "re.match('(a+)+$', 'a' * 40 + 'b')"]


@pytest.mark.parametrize("statement", HANGS)
def test_hang_costs_its_answer_only_and_ends_with_all_processes(functions: Functions, statement: str) -> None:
    code = f"""
        import os, re, subprocess, time
        def score(answers):
            if "bad" in answers:
                child = subprocess.Popen(["sleep", "1000"])
                open("pid", "w").write(str(child.pid))
                {statement}
            return [1.0] * len(answers)
    """
    scored = functions.score(code, ["good", "bad", "good"], timeout_seconds=0.5)
    assert scored.rewards == [[1, None, 1]]
    assert (scored.failed, scored.failure) == (1, "reward.functions=rewards.py:score: took longer than 0.5 s")
    assert ends_within(functions.saved_pid(), 1)


def test_function_that_always_hangs_ends_within_twice_its_time(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many answers it hangs for; a run would end as hung otherwise, without the name of the function."""
    monkeypatch.setattr(RewardFunctionsConfig, "retry_seconds", 2.0)
    began = time.monotonic()
    scored = functions.score("import time\ndef score(a): time.sleep(1000)", ["a"] * 30, timeout_seconds=1.0)
    assert time.monotonic() - began < 20  # 30 calls of a second each take longer
    assert (scored.rewards, scored.failed) == ([[None] * 30], 30)
    assert scored.failure.endswith("took longer than 1 s")


def test_process_that_a_function_forks_does_not_reply(functions: Functions) -> None:
    functions.write("import os\ndef score(answers): os.fork(); return [len(answers[0])]")
    started = functions.start()
    for length in (1, 2, 3):
        assert started.score(["a" * length], columns(1), 0).rewards == [[length]]


def test_value_that_cannot_be_converted_is_a_failure_with_its_traceback(functions: Functions) -> None:
    scored = functions.score("class V:\n    def tolist(self): return 1 / 0\ndef score(answers): return V()", ["a"])
    assert "ZeroDivisionError" in scored.failure


def test_catastrophic_pattern_of_the_config(functions: Functions) -> None:
    started = functions.start("regex", "length", pattern="^(a+)+$", timeout_seconds=0.5)
    scored = started.score(["aa", "a" * 40 + "b"], columns(2, "aa"), 0)
    assert scored.rewards == [[1, None], [0.9, 0.8]]
    assert (scored.failed, scored.failure) == (1, "reward.functions=regex: took longer than 0.5 s")


def test_interrupted_call_does_not_leave_its_reply_to_the_next(functions: Functions) -> None:
    functions.write("import time\ndef score(answers): time.sleep(answers[0] == 'slow'); return [len(answers[0])]")
    started = functions.start()
    started.score(["a"], columns(1), 0)

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            started.score(["slow"], columns(1), 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert started.score(["abc"], columns(1), 0) == Scored([[3]], 0, "")


def test_worker_ends_with_the_context_after_its_exit_handlers(functions: Functions) -> None:
    functions.write("""
        import atexit, os, pathlib, subprocess, time
        def end():
            time.sleep(0.2)
            pathlib.Path("ended").touch()
        atexit.register(end)
        def score(answers):
            child = subprocess.Popen(["sleep", "1000"])
            pathlib.Path("pid").write_text(str(child.pid))
            return [os.getpid()]
    """)
    with functions.start() as started:
        ((pid,),) = started.score(["a"], columns(1), 0).rewards
        assert started.score(["a"], columns(1), 1).rewards == [[pid]]
        assert not ends_within(int(pid or 0), 0)
    assert ends_within(int(pid or 0), 0)
    assert (functions.folder / "ended").exists()
    assert ends_within(functions.saved_pid(), 1)


def test_worker_that_does_not_end_is_killed(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.training.rewards._END_SECONDS", 0.2)
    functions.write("import atexit, os, time\natexit.register(time.sleep, 1000)\ndef score(a): return [os.getpid()]")
    with functions.start() as started:
        ((pid,),) = started.score(["a"], columns(1), 0).rewards
    assert ends_within(int(pid or 0), 0)


def test_requests_to_stop_reach_the_rank_only(functions: Functions) -> None:
    """A scheduler may signal every process of a job; the rank then saves, and must not lose the answers."""
    code = """
        import os, signal, subprocess
        def score(answers):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            child = subprocess.Popen(["sleep", "1000"])
            child.terminate()
            if (forked := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            return [child.wait(), os.waitpid(forked, 0)[1]]
    """
    assert functions.score(code, ["a", "b"]) == Scored([[-15, 15]], 0, "")


@pytest.mark.parametrize("statement", ["return [1]", *HANGS])
def test_worker_and_its_processes_end_when_the_rank_is_killed(functions: Functions, statement: str) -> None:
    functions.write(f"""
        import os, re, subprocess, time
        def score(answers):
            child = subprocess.Popen(["sleep", "1000"])
            open("pid", "w").write(str(os.getpid()))
            open("child", "w").write(str(child.pid))
            {statement}
    """)
    code = """
        import time
        from components.config.schema.rollouts import RewardFunctionsConfig
        from components.training.rewards import RewardFunctions
        reward = RewardFunctions(RewardFunctionsConfig(functions=["rewards.py:score"]), 10)
        reward.score(["a"], {"prompts": [""], "token_ids": [[]]}, 0)
        time.sleep(1000)
    """
    rank = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        worker, child = functions.saved_pid(), functions.saved_pid("child")
        assert not ends_within(worker, 0)
        assert os.getpgid(worker) == worker
    finally:
        rank.kill()
        rank.wait()
    assert ends_within(worker, 5)
    assert ends_within(child, 5)


def test_checks_before_launch_do_not_import_the_code(functions: Functions) -> None:
    functions.write("""
        raise SystemExit("imported")
        import os.path as imported
        from math import floor
        def score(answers): inner = 1
        async def later(answers): pass
        assigned: object = lambda answers: (hidden := 1)
        if True:
            def in_block(answers): pass
    """)
    functions.write("def score(:", "wrong.py")
    functions.write("from rewards import *", "star.py")
    (functions.folder / "local_package").mkdir()

    def check(*names: str, columns: list[str] | None = None, **options: Any) -> list[str]:
        return check_reward_functions(RewardFunctionsConfig(functions=list(names), **options), columns)

    fine = ("score", "imported", "floor", "assigned", "in_block")
    assert check(*(f"rewards.py:{name}" for name in fine), "star.py:any", f"{functions.folder}/rewards.py:score") == []
    assert check("trl.rewards:think_format_reward", "local_package.module:f", "json:loads", "sys:exit") == []
    assert check("rewards.py:inner", "rewards.py:later", "wrong.py:score", "absent.py:score", "absent.module:f") == [
        "reward.functions=rewards.py:inner: rewards.py must define inner; it defines score",
        "reward.functions=rewards.py:later: is an async function; must be an ordinary one; call asyncio.run in it",
        "reward.functions=wrong.py:score: wrong.py is not valid Python: invalid syntax (<unknown>, line 1); correct it",
        f"reward.functions=absent.py:score: {functions.folder}/absent.py cannot be read: No such file or directory; "
        "correct the path",
        "reward.functions=absent.module:f: no module named 'absent'; install it, or put it into the current directory, "
        f"{functions.folder}",
    ]
    compares = ("gsm8k", "number", "exact")
    for available in (None, ["question", "answer"]):
        assert check(*compares, "regex", "length", pattern="(a)", columns=available) == []
    assert check("regex", "format", "length", pattern="a", columns=["question"]) == []
    problems = check(*compares, "regex", pattern="(a)", columns=["question", "solution"])
    assert [problem.partition(":")[0] for problem in problems] == [
        f"reward.functions={n}" for n in (*compares, "regex")
    ]
    assert problems[0] == (
        "reward.functions=gsm8k: compares with the column answer, but the data has question, solution "
        "besides the prompt; set data.answer_column to the column with the correct answers"
    )
