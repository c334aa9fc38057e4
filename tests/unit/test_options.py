"""Command lines: Triton's flags, its spellings, its refusals; and the log format."""

import json
import logging
import re

import pytest

from broker import process_setup
from broker.flags import UsageError, boolean
from broker.logs import MAX_MESSAGE, TritonFormatter
from broker.options import parse_serve, region_memory_bytes
from broker.tables import ascii_table
from broker.triton_flags import BOOLEAN, REPEATED, SINGLE

REPOSITORY = "--model-repository=/models"


def test_defaults():
    options = parse_serve([REPOSITORY])
    assert options.model_repository == ("/models",)
    assert options.exit_timeout_secs == 30
    assert options.exit_on_error
    assert options.model_load_deaths == 5
    assert not options.allow_code_overrides
    assert options.without_effect == []


def test_code_with_a_load_must_be_allowed():
    assert parse_serve([REPOSITORY, "--allow-code-overrides"]).allow_code_overrides
    assert not parse_serve([REPOSITORY, "--allow-code-overrides=false"]).allow_code_overrides
    with pytest.raises(UsageError, match="perhaps"):
        parse_serve([REPOSITORY, "--allow-code-overrides=perhaps"])


def test_repositories_accumulate_under_both_names():
    options = parse_serve(["--model-repository", "/a", "--model-store=/b", "--model-repository=/c"])
    assert options.model_repository == ("/a", "/c", "/b")


def test_a_repository_is_required():
    with pytest.raises(UsageError, match=r"^--model-repository must be specified$"):
        parse_serve(["--log-verbose=1"])


VALUES = {
    "log-format": "ISO8601",
    "model-control-mode": "none",
    "http-restricted-api": "health:admin=1",
    "grpc-restricted-protocol": "health:admin=1",
    "grpc-infer-response-compression-level": "low",
    "metrics-config": "summary_latencies=true",
    "trace-config": "level=TIMESTAMPS",
    "cache-config": "local,size=1048576",
    "rate-limit": "execution_count",
    "rate-limit-resource": "resource1:4:0",
    "trace-level": "OFF",
}


@pytest.mark.parametrize("flag", sorted(SINGLE | REPEATED - {"model-repository", "model-store", "load-model"}))
def test_every_triton_flag_with_a_value_is_accepted(flag):
    value = VALUES.get(flag, "1")
    for arguments in ([f"--{flag}={value}"], [f"--{flag}", value]):
        options = parse_serve([REPOSITORY, *arguments])
        assert options.triton[flag] == (value,)


@pytest.mark.parametrize("flag", sorted(BOOLEAN - {"model-namespacing"}))
def test_every_triton_bool_is_accepted_in_every_spelling(flag):
    with_it = [REPOSITORY, "--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"]
    for value in ("true", "False", "on", "OFF", "1", "0"):
        assert parse_serve([*with_it, f"--{flag}={value}"]).triton[flag] == (value,)
    assert parse_serve([*with_it, f"--{flag}"]).triton[flag] == ("true",)
    with pytest.raises(UsageError, match="invalid value for bool option: perhaps"):
        parse_serve([REPOSITORY, f"--{flag}=perhaps"])


def test_the_beginning_of_a_flag_is_enough_where_it_is_one():
    options = parse_serve([REPOSITORY, "--log-warn=false", "--http-po", "8080"])
    assert options.triton["log-warning"] == ("false",)
    assert options.triton["http-port"] == ("8080",)


def test_flags_without_effect_are_named_once_each():
    options = parse_serve(
        [REPOSITORY, "--host-policy=1", "--host-policy=2", "--exit-on-error=false", "--rate-limit-resource=r:1"]
    )
    assert options.without_effect == [
        "--host-policy",
        "--rate-limit-resource (without --rate-limit=execution_count)",
    ]
    assert not options.exit_on_error
    polling = [REPOSITORY, "--repository-poll-secs=3", "--model-control-mode"]
    assert parse_serve([*polling, "poll"]).without_effect == []
    assert parse_serve([*polling, "none"]).without_effect == [
        "--repository-poll-secs (without --model-control-mode=poll)"
    ]


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ("--backend-config=default-max-batch-size=2", []),
        ("--backend-config=onnxruntime,default-max-batch-size=2", []),
        ("--backend-config=tensorrt,default-max-batch-size=2", ["--backend-config=tensorrt,default-max-batch-size=2"]),
        ("--backend-config=onnxruntime,enable-global-threadpool=1", None),
        ("--backend-config=python,shm-default-byte-size=1", None),
        ("--metrics-config=summary_latencies=true", []),
        ("--metrics-config=summary_quantiles=0.5:0.1", []),
        ("--metrics-config=histograms=true", None),
    ],
)
def test_settings_without_effect_are_named_as_they_are(given, ignored):
    assert parse_serve([REPOSITORY, given]).without_effect == ([given] if ignored is None else ignored)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nonsense"], "Unexpected argument: --nonsense\n"),
        (["--model-repo-sitory=x"], "Unexpected argument: --model-repo-sitory=x (did you mean --model-repository?)\n"),
        (["--gateway-s=2"], "Unexpected argument: --gateway-s=2 (did you mean --gateways?)\n"),
        (["--http-po"], "argument --http-port: expected one argument"),
        (["--log-w=1", "--log=1"], "ambiguous option: --log=1 could match --log-"),
        (["stray"], "Unexpected argument: stray"),
        (["--load-model=m"], "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well."),
        (["--http-max-input-size=0"], "Error: --http-max-input-size must be greater than 0."),
        (["--exit-timeout-secs=99999999999"], "invalid value for --exit-timeout-secs: 99999999999"),
        (["--trace-config=,rate=1"], "No trace mode specified. --trace-config option format is <trace mode>,"),
        (["--trace-config=rate"], "--trace-config option format is '<trace mode>,<setting>=<value>'. Got rate"),
        (["--trace-config=jaeger,url=x"], "invalid value for trace mode option: jaeger. Available options are"),
        (["--trace-level=some"], "invalid value for trace level option: some"),
        (["--exit-timeout-secs=soon"], "invalid value for --exit-timeout-secs: soon"),
        (["--model-load-timeout-secs=0"], "invalid value for --model-load-timeout-secs: 0 (expected at least 1)"),
        (["--log-format=xml"], "invalid argument for --log-format, got: xml"),
        (
            ["--model-control-mode=magic"],
            "invalid argument for --model-control-mode: magic (expected none, poll or explicit)",
        ),
        (["--region-memory=lots"], "invalid value for --region-memory: lots"),
        (["--cuda-region-memory=much"], "invalid value for --cuda-region-memory: much"),
        (["--model-memory-limit=half"], "invalid value for --model-memory-limit: half (expected bytes, e.g. 8G)"),
        (["--model-memory-limit=50%"], "invalid value for --model-memory-limit: 50%"),
        (["--model-memory-limit=-1"], "invalid value for --model-memory-limit: -1"),
        (["--region-memory=101%"], "invalid value for --region-memory: 101%"),
    ],
)
def test_refusals(arguments, text):
    with pytest.raises(UsageError) as refusal:
        parse_serve([REPOSITORY, *arguments])
    assert str(refusal.value).startswith(text)


def test_settings_that_reach_the_loader():
    options = parse_serve([REPOSITORY, "--strict-model-config=true", "--backend-config=default-max-batch-size=8"])
    assert options.strict_model_config
    assert options.default_max_batch_size == 8
    options = parse_serve(
        [
            REPOSITORY,
            "--disable-auto-complete-config",
            "--backend-config=onnxruntime,default-max-batch-size=16",
            "--backend-config=python,default-max-batch-size=2",
        ]
    )
    assert options.strict_model_config
    assert options.default_max_batch_size == 16


@pytest.mark.parametrize(("given", "level"), [("3", 3), ("true", 1), ("False", 0)])
def test_log_verbose_is_a_number_or_a_bool(given, level):
    assert parse_serve([REPOSITORY, f"--log-verbose={given}"]).log.log_verbose_level == level


def test_trace_settings_at_start():
    assert parse_serve([REPOSITORY]).trace[:2] == ("", {})
    flags = ("--trace-file=/old", "--trace-rate=7", "--trace-level=min", "--trace-config=mode=triton")
    newer = ("--trace-config=triton,file=/t.json", "--trace-config=rate=1", "--trace-config=level=TENSORS")
    file, settings = parse_serve([REPOSITORY, *flags, *newer, "--trace-config=triton,log-frequency=5"]).trace[:2]
    assert file == "/t.json"
    assert settings == {"trace_rate": "1", "trace_level": ["TIMESTAMPS", "TENSORS"], "log_frequency": "5"}
    assert parse_serve([REPOSITORY, "--trace-level=max", "--trace-level=off"]).trace[1] == {"trace_level": ["OFF"]}


def test_explicit_control():
    options = parse_serve([REPOSITORY, "--model-control-mode=explicit", "--load-model=a", "--load-model=b"])
    assert (options.model_control_mode, options.load_model) == ("explicit", ("a", "b"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000", 1000),
        ("64K", 65536),
        ("64KiB", 65536),
        ("1.5g", 3 << 29),
        ("2T", 2 << 40),
        ("50%", 500),
        ("100 %", 1000),
    ],
)
def test_region_memory(text, expected):
    assert region_memory_bytes(text, 1000) == expected


def test_boolean_spellings():
    assert [boolean(text) for text in ("TRUE", "On", "1", "false", "off", "0")] == [True] * 3 + [False] * 3


# --- log and tables -----------------------------------------------------------------------------------------------


def line(style="default", level=logging.ERROR, text="failed %s", *arguments):
    record = logging.LogRecord("broker", level, "/x/server.py", 57, text, arguments, None)
    return TritonFormatter(style).format(record)


def test_log_lines_are_tritons(monkeypatch):
    assert re.fullmatch(
        r'E[0-9]{4} \d\d:\d\d:\d\d\.\d{6} \d+ server\.py:57\] "failed to load"',
        line("default", 40, "failed %s", "to load"),
    )
    assert line(level=logging.WARNING)[0] == "W"
    assert line(level=logging.DEBUG)[0] == "I"
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ E \d+ server\.py:57\] "x"', line("ISO8601", logging.ERROR, "x")
    )
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    assert line("default", 40, "plain").endswith("] plain")


def test_a_message_cannot_start_a_line_of_its_own():
    forged = line("default", 40, "model '%s'", "m\r\nE1129 forged \x1b[31m")
    assert "\n" not in forged
    assert "\x1b" not in forged
    assert json.loads(forged.partition("] ")[2]) == "model 'm\r\nE1129 forged \x1b[31m'"
    assert len(line("default", 40, "x" * 100_000)) < MAX_MESSAGE + 200


def test_a_table_keeps_its_lines():
    record = logging.LogRecord("broker", logging.INFO, "/x/server.py", 57, "%s", ("+--+\n|ab|",), None)
    record.is_table = True
    assert re.fullmatch(
        r"I\d{4} [\d:.]+ \d+ server\.py:57\] \n\+--\+\n\|ab\|", TritonFormatter("default").format(record)
    )


def test_ascii_table():
    assert ascii_table(("Model", "N"), [("a", 1), ("longer", 20)]).splitlines() == [
        "+--------+----+",
        "| Model  | N  |",
        "+--------+----+",
        "| a      | 1  |",
        "| longer | 20 |",
        "+--------+----+",
    ]


def test_two_builds_of_one_runtime_are_complained_about(monkeypatch, caplog):
    class Installed:
        version = "1.2"

    monkeypatch.setattr(process_setup, "distribution", lambda name: Installed)
    process_setup.complain_about_runtimes()
    assert "both onnxruntime 1.2 and onnxruntime-gpu 1.2 are installed" in caplog.text


def test_models_of_one_name_in_several_repositories_are_not_served():
    assert parse_serve([REPOSITORY, "--model-namespacing=false"]).without_effect == []
    with pytest.raises(UsageError, match="--model-namespacing=true is not supported"):
        parse_serve([REPOSITORY, "--model-namespacing"])


def test_the_help_lists_what_works_and_what_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse_serve(["--help"])
    listed, _, rest = (
        " ".join(capsys.readouterr().out.split()).partition("These do what they do there: ")[2].partition(". ")
    )
    assert "--model-config-name" in listed
    assert "--model-namespacing" not in listed
    assert rest.startswith("--model-namespacing=true is refused.")


def test_all_models_are_asked_for_alone():
    explicit = [REPOSITORY, "--model-control-mode=explicit", "--load-model=*"]
    assert parse_serve(explicit).load_model == ("*",)
    with pytest.raises(UsageError, match=r"Wildcard model name '\*' must be the ONLY startup model"):
        parse_serve([*explicit, "--load-model=m"])


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("1000", 1000), ("1.5k", 1536), ("8G", 8 << 30), ("2 MiB", 2 << 20)]
)
def test_the_limit_on_models_memory(text, expected):
    assert parse_serve(["--model-repository=r", f"--model-memory-limit={text}"]).model_memory_limit == expected
    assert parse_serve(["--model-repository=r"]).model_memory_limit == 0


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ((), ""),
        (("--disable-auto-complete-config",), ""),
        (
            ("--strict-model-config=true",),
            "Warning: '--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' "
            "instead.",
        ),
        (
            ("--disable-auto-complete-config", "--strict-model-config=false"),
            "Warning: Overriding deprecated '--strict-model-config' from False to True in favor of "
            "'--disable-auto-complete-config'!",
        ),
    ],
)
def test_a_flag_by_its_old_name_works_with_a_warning(flags, warning):
    options = parse_serve(["--model-repository=m", *flags])
    assert options.deprecated == warning
    assert options.strict_model_config == bool(flags)


def test_the_help_of_serve_names_tritons_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_serve(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--http-port,", "--trace-config,", "--model-control-mode,"):
        assert flag in text
    assert "--sagemaker-port" not in text  # without effect
    assert "docs/compatibility.md" in text
