"""Scoring: a teacher reads a corpus once and writes a loss store."""

from vocagnolm.jobs.cluster import RayCluster
from vocagnolm.jobs.job import Share
from vocagnolm.model.server import Server
from vocagnolm.score.run import ScoreSummary, score_corpus
from vocagnolm.score.teacher import (
    LocalTeacher,
    ScoreSettings,
    ServerTeacher,
    Teacher,
    TokenizedDocument,
)
from vocagnolm.score.work import score_shard

__all__ = [
    "LocalTeacher",
    "RayCluster",
    "ScoreSettings",
    "ScoreSummary",
    "Server",
    "ServerTeacher",
    "Share",
    "Teacher",
    "TokenizedDocument",
    "score_corpus",
    "score_shard",
]
