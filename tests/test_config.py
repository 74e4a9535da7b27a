"""Settings: one name everywhere, arguments over variables over defaults, and every clash found early."""

import argparse
import dataclasses
import logging
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from ftkit import config
from ftkit.config import FIELDS, Settings, add_arguments, child_environment, settings_table
from ftkit.errors import ConfigError


def resolve(environ=None, **explicit):
    return Settings.resolve(environ or {}, **explicit)


def refusal(environ=None, **explicit):
    with pytest.raises(ConfigError) as caught:
        resolve(environ, **explicit)
    return str(caught.value)


def test_defaults_are_the_documented_ones():
    settings = resolve()
    assert settings.etcd == ("http://127.0.0.1:2379",)
    assert (settings.job, settings.min_replicas, settings.max_replicas) == ("default", 1, 0)
    assert (settings.group_rank, settings.group_world_size) == (0, 1)
    assert (settings.timeout, settings.collective_timeout, settings.heal_timeout) == (60, 60, 600)
    assert (settings.rendezvous_timeout, settings.join_timeout, settings.freeze_grace) == (30, 60, 5)
    assert settings.bind == settings.advertise == "127.0.0.1"
    assert settings.progress_timeout is None
    assert settings.init_sync is True
    assert settings.token is None


def test_an_argument_beats_the_variable_which_beats_the_default():
    environ = {"FTKIT_JOB": "from-variable"}
    assert resolve(environ, job="from-argument").job == "from-argument"
    assert resolve(environ).job == "from-variable"
    assert resolve(environ, job=None).job == "from-variable"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("FTKIT_JOB", "from-process")
    assert Settings.resolve().job == "from-process"


def test_an_empty_variable_counts_as_not_set():
    """`${X:-}` in a compose file sets an empty variable."""
    assert resolve({"FTKIT_JOB": "", "FTKIT_TIMEOUT": " ", "ETCDCTL_ENDPOINTS": ""}).timeout == 60


def test_zero_is_a_value_and_not_unset():
    settings = resolve({"RANK": "0", "FTKIT_MAX_REPLICAS": "0", "FTKIT_GATHER_WINDOW": "0"}, suspect_grace=0)
    assert (settings.group_rank, settings.gather_window, settings.suspect_grace) == (0, 0.0, 0.0)


def test_ftkits_variable_beats_etcdctls():
    environ = {"ETCDCTL_ENDPOINTS": "http://a:1", "FTKIT_ETCD": "http://b:2"}
    assert resolve(environ, bind="127.0.0.1").etcd == ("http://b:2",)
    del environ["FTKIT_ETCD"]
    assert resolve(environ, bind="127.0.0.1").etcd == ("http://a:1",)


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ("10.0.0.1:2379", ("http://10.0.0.1:2379",)),
        ("etcd-1", ("http://etcd-1:2379",)),
        ("http://a:1, b:2 ,,http://a:1", ("http://a:1", "http://b:2")),
        ("https://a:1,b:2", ("https://a:1", "https://b:2")),
        ("HTTP://a:1/", ("http://a:1",)),
        ("[::1]:2379", ("http://[::1]:2379",)),
        ("http://[fd00::7]", ("http://[fd00::7]:2379",)),
        ("embedded", ("embedded",)),
        (["a:1", "b:2"], ("http://a:1", "http://b:2")),
    ],
)
def test_endpoints_are_completed(given, settled):
    assert resolve(etcd=given, bind="127.0.0.1").etcd == settled


@pytest.mark.parametrize(
    "given",
    [
        "http://",
        "ftp://a:1",
        "http://a:port",
        "http://a:99999",
        "http://a:0",
        "http://a:1/path",
        "http://user:pw@a:1",
        "http://a:1,https://b:2",
        "embedded,http://a:1",
        "a b:1",
        ",",
        "http://[::1",
        7,
    ],
)
def test_malformed_endpoints_are_refused(given):
    assert refusal(etcd=given).startswith("etcd=")


def test_hosts_of_the_endpoints_carry_no_scheme():
    assert resolve(etcd="https://a:1,b:2", bind="127.0.0.1").etcd_hosts == ("a:1", "b:2")
    embedded = resolve(etcd="embedded")
    assert (embedded.embedded, embedded.etcd_hosts, embedded.bind) == (True, (), "127.0.0.1")


def test_a_certificate_makes_endpoints_without_scheme_secure(tmp_path):
    """As etcdctl does; and the default endpoint has no scheme either."""
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    settings = resolve({"ETCDCTL_CACERT": str(ca)})
    assert (settings.etcd, settings.secure) == (("https://127.0.0.1:2379",), True)
    text = refusal(etcd="http://a:1", bind="127.0.0.1", etcd_ca_cert=ca)
    assert "etcd_ca_cert" in text
    assert "https" in text


def test_a_client_certificate_needs_its_key(tmp_path):
    cert = tmp_path / "c.pem"
    cert.write_text("")
    text = refusal(etcd_cert=cert)
    assert "etcd_cert" in text
    assert "etcd_key" in text


def test_a_certificate_that_cannot_be_read_is_found_at_the_start(tmp_path):
    text = refusal({"ETCDCTL_CACERT": str(tmp_path / "missing.pem")})
    assert "ETCDCTL_CACERT" in text
    assert "missing.pem" in text


def test_user_and_password_come_together_or_apart():
    one = resolve({"ETCDCTL_USER": "root:pass:word"})
    two = resolve({"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "pass:word"})
    assert (one.etcd_username, one.etcd_password) == ("root", "pass:word")
    assert (two.etcd_username, two.etcd_password) == ("root", "pass:word")
    assert "ETCDCTL_PASSWORD" in refusal(etcd_user="root")
    assert resolve().etcd_username is None


def test_secrets_show_neither_in_repr_nor_in_errors():
    settings = resolve(token="s3cret", etcd_user="root:s3cret")
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in str(settings)
    assert settings.token == "s3cret"
    assert "s3cret" not in refusal({"FTKIT_TOKEN": "s3cret\x00"})


@pytest.mark.parametrize("bad", ["s\u00e9cret", "secret ", " secret", ""])
def test_a_token_that_could_not_stand_in_a_header_is_refused_and_not_shown(bad):
    """The transport sends it with every request; better to hear of it now."""
    text = refusal(token=bad)
    assert text.startswith("token:")
    assert "cret" not in text


@pytest.mark.parametrize("name", ["job", "replica_id"])
@pytest.mark.parametrize("bad", ["a/b", "a b", "a\tb", "a\x00", "", "x" * 101, "a\u2028b", 3])
def test_names_that_would_break_a_key_are_refused(name, bad):
    assert refusal(**{name: bad}).startswith(f"{name}=")


def test_names_may_be_long_and_foreign():
    assert resolve(job="x" * 100, replica_id="trainer-ä.1").replica_id == "trainer-ä.1"


@pytest.mark.parametrize(
    ("variable", "bad"),
    [
        ("FTKIT_TIMEOUT", "1 h"),
        ("FTKIT_TIMEOUT", "nan"),
        ("FTKIT_TIMEOUT", "inf"),
        ("FTKIT_TIMEOUT", "0"),
        ("FTKIT_GATHER_WINDOW", "-1"),
        ("FTKIT_MIN_REPLICAS", "0"),
        ("FTKIT_MIN_REPLICAS", "1.5"),
        ("FTKIT_MAX_REPLICAS", "-1"),
        ("FTKIT_LEASE_TTL", "1"),
        ("FTKIT_PROGRESS_TIMEOUT", "0"),
        ("FTKIT_MAX_RETRIES", "0"),
        ("FTKIT_INIT_SYNC", "yes"),
        ("FTKIT_KEEPER_LOG", "LOUD"),
        ("FTKIT_BIND", "127.0.0.1:80"),
        ("FTKIT_ADVERTISE", "0.0.0.0"),
        ("RANK", "x"),
        ("WORLD_SIZE", "0"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_a_malformed_variable_is_named_with_its_value(variable, bad):
    text = refusal({variable: bad})
    assert variable.removeprefix("FTKIT_").lower() in text.lower()
    assert bad in text


@pytest.mark.parametrize("bad", [True, [], "x"])
def test_an_argument_of_the_wrong_type_is_refused(bad):
    assert refusal(min_replicas=bad).startswith("min_replicas=")


def test_times_may_be_timedeltas_as_in_torch():
    assert resolve(timeout=timedelta(minutes=2)).collective_timeout == 120


def test_progress_timeout_can_be_switched_off_again():
    assert resolve({"FTKIT_PROGRESS_TIMEOUT": "30"}).progress_timeout == 30
    assert resolve({"FTKIT_PROGRESS_TIMEOUT": "30"}, progress_timeout="off").progress_timeout is None


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("1", True), ("true", True), ("False", False), (True, True)]
)
def test_truth_values_are_zero_one_true_false(text, value):
    assert resolve(init_sync=text).init_sync is value


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"outage_grace": 90}, ("outage_grace", "takeover_after")),
        ({"lease_ttl": 60}, ("lease_ttl", "outage_grace")),
        ({"freeze_grace": 61}, ("freeze_grace", "outage_grace")),
        ({"suspect_grace": 60}, ("suspect_grace", "collective_timeout")),
        ({"rendezvous_timeout": 61}, ("rendezvous_timeout", "join_timeout")),
        ({"rendezvous_timeout": 30, "heal_timeout": 20}, ("rendezvous_timeout", "heal_timeout")),
        ({"join_timeout": 60, "quorum_timeout": 30}, ("join_timeout", "quorum_timeout")),
        ({"min_replicas": 3, "max_replicas": 2}, ("min_replicas", "max_replicas")),
        ({"group_rank": 2, "group_world_size": 2}, ("group_rank", "group_world_size")),
        ({"group_world_size": 2}, ("group_world_size", "group_rank")),
        ({"group_world_size": 2, "group_rank": 0}, ("group_world_size", "master_addr")),
        ({"bind": "0.0.0.0", "advertise": "0.0.0.0"}, ("advertise", "0.0.0.0")),
    ],
)
def test_settings_that_clash_are_both_named(settings, names):
    text = refusal(**settings)
    assert all(name in text for name in names), text


def test_a_clash_says_which_variable_brought_it():
    assert "from FTKIT_OUTAGE_GRACE" in refusal({"FTKIT_OUTAGE_GRACE": "100"})


def test_all_problems_are_told_at_once():
    text = refusal({"RANK": "x", "FTKIT_TIMEOUT": "soon"}, job="a/b", min_replica=2)
    assert all(part in text for part in ("RANK=x", "FTKIT_TIMEOUT=soon", "job=a/b", "min_replica:"))
    text = refusal({"FTKIT_OUTAGE_GRACE": "100"}, min_replicas=3, max_replicas=2)
    assert "takeover_after" in text
    assert "max_replicas" in text


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant():
    assert "did you mean min_replicas" in refusal(min_replica=1)


@pytest.mark.parametrize("timeout", [0.5, 1, 5, 29, 60, 1000])
def test_derived_times_follow_the_one_budget_without_clash(timeout):
    """One number must be enough to make everything faster or more patient."""
    settings = resolve(timeout=timeout)
    assert settings.collective_timeout == settings.join_timeout == timeout
    assert settings.heal_timeout == 10 * timeout
    assert settings.rendezvous_timeout == min(timeout, 30)
    assert settings.suspect_grace < settings.collective_timeout


@pytest.mark.parametrize("given", [{"join_timeout": 2}, {"heal_timeout": 3}, {"quorum_timeout": 5}])
def test_a_single_short_time_shortens_what_is_derived_from_it(given):
    assert resolve(**given).rendezvous_timeout <= next(iter(given.values()))


def test_torchrun_says_what_the_replica_group_is():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    settings = resolve(environ)
    assert (settings.group_rank, settings.group_world_size) == (3, 4)
    assert (settings.master_addr, settings.master_port) == ("node-0", 29500)


def test_torchrun_says_whether_it_serves_a_store_and_how_often_it_has_restarted(monkeypatch):
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (config.agent_store(), config.restart_count()) == (False, 0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert (config.agent_store(), config.restart_count()) == (True, 3)


def test_a_group_on_several_machines_needs_a_name():
    """Its ranks would otherwise each take their own hostname."""
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "n",
        "MASTER_PORT": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert "FTKIT_REPLICA_ID" in refusal(environ)
    assert resolve({**environ, "FTKIT_REPLICA_ID": "a"}).replica_id == "a"


def test_a_member_listens_on_loopback_only_if_all_of_etcd_is_there():
    assert resolve(etcd="localhost:1,127.0.0.5:2,[::1]:3").bind == "127.0.0.1"


def test_no_route_and_no_name_still_gives_an_address(monkeypatch, caplog):
    """Settling must not fail for a name that cannot be resolved yet; connecting will tell."""
    monkeypatch.setattr(config.values, "_local_address", lambda host, port: None)
    with caplog.at_level(logging.WARNING):
        assert resolve(etcd="http://nowhere.invalid:2379").bind == "127.0.0.1"
    assert "no network interface" in caplog.text


def test_the_interface_that_leads_to_etcd_is_the_one_to_listen_on(monkeypatch):
    routes = {"second": "10.9.8.7"}
    monkeypatch.setattr(config.values, "_local_address", lambda host, port: routes.get(host))
    settings = resolve(etcd="first:1,second:2")
    assert (settings.bind, settings.advertise) == ("10.9.8.7", "10.9.8.7")
    everywhere = resolve(etcd="first:1,second:2", bind="0.0.0.0")
    assert (everywhere.bind, everywhere.advertise) == ("0.0.0.0", "10.9.8.7")
    assert resolve(etcd="first:1", bind="10.1.1.1").advertise == "10.1.1.1"


def test_the_core_gets_its_limits():
    policy = resolve(min_replicas=2, max_replicas=4, timeout=7, lease_ttl=3).policy()
    assert (policy.min_replicas, policy.max_replicas, policy.join_timeout) == (2, 4, 7.0)
    assert (policy.freeze_grace, policy.outage_grace, policy.takeover_after) == (3.0, 60.0, 90.0)


def test_settings_travel_to_another_process_by_variables_and_by_json():
    settings = resolve(
        etcd="embedded", job="j", token="t", timeout=0.25, progress_timeout=9, init_sync=False, replica_id="r"
    )
    assert resolve(settings.variables()) == settings
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_a_replaced_setting_is_checked_again():
    settings = resolve(job="j", etcd="embedded")
    moved = settings.replace(etcd=["http://127.0.0.1:4001"])
    assert (moved.etcd, moved.job) == (("http://127.0.0.1:4001",), "j")
    with pytest.raises(ConfigError, match="takeover_after"):
        settings.replace(outage_grace=100)


def test_a_misspelled_variable_is_told_and_others_are_left_alone(caplog):
    """FTKIT_MIN_REPLICA would otherwise be ignored in silence."""
    resolve({"FTKIT_MIN_REPLICA": "2", "FTKIT_LAUNCH_RUN": "x", "FTKIT_DEBUG": "1", "FTKIT_JOB": "j"})
    assert [record.getMessage() for record in caplog.records] == [
        "there is no setting FTKIT_MIN_REPLICA; did you mean FTKIT_MIN_REPLICAS?"
    ]


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().job = "other"


def test_a_childs_environment_adds_to_ours_and_leaves_ours_alone(monkeypatch):
    monkeypatch.setenv("SOMETHING", "else")
    child = child_environment(job="j", max_replicas=0, token=None, etcd=("http://a:1", "http://b:2"))
    assert child["SOMETHING"] == "else"
    assert (child["FTKIT_JOB"], child["FTKIT_MAX_REPLICAS"]) == ("j", "0")
    assert child["FTKIT_ETCD"] == "http://a:1,http://b:2"
    assert "FTKIT_TOKEN" not in child
    with pytest.raises(ConfigError, match="no such setting"):
        child_environment(jobb="j")


def test_every_setting_is_a_flag_of_the_same_name(monkeypatch):
    parser = argparse.ArgumentParser()
    add_arguments(parser, [field.name for field in FIELDS])
    arguments = parser.parse_args(["--min-replicas", "2", "--no-init-sync", "--etcd", "embedded"])
    monkeypatch.setenv("FTKIT_MIN_REPLICAS", "5")
    monkeypatch.setenv("FTKIT_JOB", "j")
    settings = Settings.from_arguments(arguments)
    assert (settings.min_replicas, settings.init_sync, settings.job) == (2, False, "j")
    assert settings.embedded
    assert Settings.from_arguments(arguments, min_replicas=7).min_replicas == 7
    assert parser.format_help()


def test_a_malformed_flag_is_named_by_argparse(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser, ["min_replicas"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--min-replicas", "two"])
    error = capsys.readouterr().err
    assert "--min-replicas" in error
    assert "two" in error


def test_the_table_has_a_line_for_every_setting():
    lines = settings_table().splitlines()
    assert len(lines) == 2 + len(FIELDS)
    assert all(line.count("|") == 5 for line in lines)
    assert all(field.help for field in FIELDS)


def test_reading_a_certificate_accepts_a_path_object(tmp_path: Path):
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    assert resolve(etcd_ca_cert=ca).etcd_ca_cert == str(ca)
