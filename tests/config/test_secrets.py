"""A key in an endpoint's URL or in endpoint.body is refused, and no message shows it."""

from pathlib import Path

import pytest

import eval as evaluation
from selfplay.config import load_config
from selfplay.config.secrets import check_body, check_url, hidden
from selfplay.errors import SettingsError
from tests.helpers.tiny_run import run_tiny

KEY = "planted-4711-key"
URLS = (
    f"http://user:{KEY}@127.0.0.1:8000/v1",
    f"https://{KEY}@host/v1",
    f"https://host/v1?api_key={KEY}",
    f"https://host/v1#{KEY}",
)
PARTNER = "endpoint:small@{}"
SETTINGS = (
    *(f"rollout.partners=['{PARTNER.format(url)}']" for url in URLS),
    f"rollout.partners=['{PARTNER.format(URLS[0])}*x']",
    f"reward={{judge: '{PARTNER.format(URLS[1])}'}}",
    f"eval.partners=['{PARTNER.format(URLS[0])}']",
    f"endpoint.body={{api_key: {KEY}}}",
    f"endpoint.body={{extra: [{{Authorization: {KEY}}}]}}",
    f"endpoint.body={{user: Bearer {KEY}}}",
    f"endpoint={{body: {{token: {KEY}}}}}",
    f"endpoint.body={KEY}",
    f"endpoint.api_key={KEY}",
)


@pytest.mark.parametrize("setting", SETTINGS)
def test_train_refuses_a_key_in_a_setting_without_showing_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    assert run_tiny(tmp_path / "run", setting) == 2
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert KEY not in shown.out + shown.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", SETTINGS[:3])
def test_a_key_in_a_settings_file_is_refused_with_the_file(tmp_path: Path, setting: str) -> None:
    name, _, value = setting.partition("=")
    path = tmp_path / "mine.yaml"
    path.write_text(f"model: {{scratch: {{}}}}\nrollout: {{{name.partition('.')[2]}: {value}}}\n")
    with pytest.raises(SettingsError) as caught:
        load_config(path)
    assert "mine.yaml" in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", URLS)
def test_eval_refuses_a_key_in_a_partner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    (tmp_path / "run").mkdir()
    words = [str(tmp_path / "run"), "--games", "generated"]
    assert evaluation.main([*words, "--partner", PARTNER.format(url)]) == 2
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err


@pytest.mark.parametrize("place", ["url", "body"])
def test_the_key_of_the_variable_is_found_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("PLANTED_KEY", KEY)
    url = f"http://127.0.0.1:9/{KEY if place == 'url' else 'v1'}"
    words = [f"rollout.partners=['{PARTNER.format(url)}']", "endpoint.key_variable=PLANTED_KEY"]
    words += [f"endpoint.body={{note: 'x{KEY}x'}}"] if place == "body" else []
    assert run_tiny(tmp_path / "run", *words) == 2
    assert KEY not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_ordinary_addresses_and_fields_are_taken() -> None:
    for url in ("http://127.0.0.1:8000/v1", "https://api.example.org/v1/openai"):
        check_url(f"endpoint:org/model@{url}*0.5")
        assert hidden(url) == url
    check_body(
        {
            "reasoning_effort": "low",
            "max_completion_tokens": 9,
            "stop_token_ids": [1],
            "prompt_cache_key": "games",
            "extra": {"skip_special_tokens": False, "api_key": None},
        }
    )
