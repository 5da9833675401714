"""The names on a matching board and their short forms.

The order is fixed: instances and proposals hold indices into these lists.
"""

from __future__ import annotations

from collections.abc import Sequence

# The roster of Lin et al., "Decision-Oriented Dialogue" (2024): reviewers sorted by surname.
REVIEWERS = (
    "Ava Li",
    "Daniel Nguyen",
    "Sofia Patel",
    "Andrei Petrov",
    "Morgan Reed",
    "Joseph Santos",
    "Ethan Smith",
    "Noah Wilson",
)
PAPERS = (
    "BLEU: a Method for Automatic Evaluation of MT",
    "Electra: Pre-training Text Encoders as Discriminators",
    "GloVe: Global Vectors for Word Representation",
    "GLUE: A Multi-Task Benchmark and Analysis Platform for NLU",
    "LLaMA: Open and Efficient Foundation Language Models",
    "RoBERTa: A Robustly Optimized BERT Pretraining Approach",
    "QuAC: Question Answering in Context",
    "SWAG: An Adversarial Dataset for Commonsense Inference",
)


def short_title(paper: str) -> str:
    """The part of a paper's title before its first colon."""
    return paper.split(":", 1)[0].strip()


def first_name(reviewer: str) -> str:
    """The first word of a reviewer's name."""
    return reviewer.split(" ", 1)[0]


def paper_forms(paper: str) -> tuple[str, ...]:
    """The ways a paper may be named: full title, short title."""
    return tuple(dict.fromkeys((paper, short_title(paper))))


def reviewer_forms(reviewer: str) -> tuple[str, ...]:
    """The ways a reviewer may be named: full name, first name, surname."""
    words = reviewer.split()
    return tuple(dict.fromkeys((reviewer, words[0], words[-1])))


def display_names(
    reviewers: Sequence[str], papers: Sequence[str], *, brief: bool
) -> tuple[list[str], list[str]]:
    """The names that a seat reads: short titles of papers, full names of reviewers (first names if
    `brief`)."""
    shown = [first_name(name) if brief else name for name in reviewers]
    return shown, [short_title(title) for title in papers]
