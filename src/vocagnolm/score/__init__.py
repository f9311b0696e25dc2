"""Score once: a teacher reads a corpus and leaves a loss store."""

from vocagnolm.score.cluster import RayCluster
from vocagnolm.score.run import ScoreSummary, score_corpus
from vocagnolm.score.server import ServerTeacher
from vocagnolm.score.settings import ScoreSettings, Server
from vocagnolm.score.teacher import LocalTeacher, Teacher, TokenizedDocument
from vocagnolm.score.work import Share, score_shard

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
