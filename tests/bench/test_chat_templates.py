"""The bench of public templates says of our stand-ins what their own tests say."""

import shutil
from pathlib import Path

import pytest

from bench.chat_templates import main, outcome
from tests.helpers.chat_families import TEMPLATES

EXPECTED = {
    "qwen25": "extended",
    "qwen3": "turn by turn",
    "glm45": "turn by turn",
    "llama2": "refused: the chat template writes ' '",
    "gpt_oss": "refused: ",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_outcome_is_that_of_the_template(name: str) -> None:
    assert outcome((TEMPLATES / f"{name}.jinja").read_text(), {}).startswith(EXPECTED[name])


def test_nothing_is_taken_that_is_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(TEMPLATES), "--names"])
    said = capsys.readouterr().out
    assert "WRONG" not in said
    assert "qwen25" in said and "the same as another" not in said


def test_odd_files_cost_only_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(TEMPLATES / "qwen25.jinja", tmp_path)
    (tmp_path / "a.py").mkdir()
    (tmp_path / "old.py").write_text("print 'Python 2'\n")
    main([str(tmp_path), "--names"])
    said = capsys.readouterr()
    assert "1 | extended" in said.out
    assert said.err.startswith(f"{tmp_path / 'old.py'}: left out") and said.err.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "nothing")])
    assert ended.value.code == 2 and "FOLDER must be a folder" in capsys.readouterr().err
