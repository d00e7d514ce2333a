"""The inspector on Postgres."""

from server.postgres.inspection.assistants import AssistantReader
from server.postgres.inspection.job_reports import JobReader
from server.postgres.inspection.overviews import OverviewReader
from server.postgres.inspection.timelines import TimelineReader
from server.postgres.inspection.usage_reports import UsageReader


class PostgresInspector(TimelineReader, OverviewReader, AssistantReader, UsageReader, JobReader):
    """Implements `server.inspection.port.Inspector`: each base class reads one subject."""
