"""The teacher's work, done once: it reads a corpus and leaves a loss store (`score`), or answers
prompts and leaves conversations with the store over them (`write`)."""

from vocagnolm.jobs.cluster import RayCluster
from vocagnolm.jobs.job import Share
from vocagnolm.model.served import Server
from vocagnolm.score.preview import WritePreview, preview_answers
from vocagnolm.score.run import ScoreSummary, score_corpus
from vocagnolm.score.served import Spending
from vocagnolm.score.teacher import (
    LocalTeacher,
    ScoreSettings,
    ServerTeacher,
    Teacher,
    TokenizedDocument,
)
from vocagnolm.score.work import score_shard
from vocagnolm.score.write import WriteSummary, read_prompts, write_answers
from vocagnolm.score.writers import LocalWriter, Writer, WriteSettings
from vocagnolm.score.written import ReadPrompt, WrittenAnswer

__all__ = [
    "LocalTeacher",
    "LocalWriter",
    "RayCluster",
    "ReadPrompt",
    "ScoreSettings",
    "ScoreSummary",
    "Server",
    "ServerTeacher",
    "Share",
    "Spending",
    "Teacher",
    "TokenizedDocument",
    "WritePreview",
    "WriteSettings",
    "WriteSummary",
    "Writer",
    "WrittenAnswer",
    "preview_answers",
    "read_prompts",
    "score_corpus",
    "score_shard",
    "write_answers",
]
