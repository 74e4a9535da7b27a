"""Every error that ftkit raises, in one tree.

A message says what happened, to whom, and what to do about it.
"""


class FtkitError(Exception):
    """The root of all errors raised by ftkit."""


class ConfigError(FtkitError, ValueError):
    """A setting is missing, malformed or contradicts another one."""


class EtcdError(FtkitError):
    """etcd could not be used; see the subclasses for what can be done."""


class EtcdUnavailable(EtcdError):
    """No endpoint of etcd answered in time."""


class EtcdAuthError(EtcdError):
    """etcd refused the credentials or the certificate."""


class EtcdNoSpace(EtcdError):
    """etcd's database is full (the NOSPACE alarm): it answers reads but refuses writes."""


class NameInUse(FtkitError):
    """Another live process already runs under this replica id."""


class JobMismatch(FtkitError):
    """This member's settings or model differ from what the job has agreed on."""


class KeeperError(FtkitError):
    """The keeper (the side process that talks to etcd) ended or could not be started."""


class GroupError(FtkitError):
    """A collective or the rendezvous of a process group failed."""


class Aborted(GroupError):
    """The process group was aborted on purpose; the step is repeated in the next epoch."""


class HealError(FtkitError):
    """The live state could not be received from the peers."""


class QuorumTimeout(FtkitError):
    """No epoch formed within the time allowed; the message says what was being waited for."""


class Left(SystemExit):
    """This replica group has left the job in order (drain, SIGTERM); training here is over.

    A SystemExit with code 0, so that a script that does not catch it ends well.
    """

    def __init__(self, why: str) -> None:
        """Say why; the exit code is 0."""
        super().__init__(0)
        self.why = why

    def __str__(self) -> str:
        return self.why


class StepFailed(FtkitError):
    """A step failed `max_retries` times in a row; the message names the member to blame if there is one."""
