"""Credentials are removed from every spelling of a URI that SQLAlchemy or MLflow accept, also inside texts."""

from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import make_url

from pipeline.errors import ExperimentError
from pipeline.experiment.schema import Tracking
from pipeline.experiment.uris import has_password, without_credentials, without_credentials_in
from pipeline.train.storage import Storage

WITH_CREDENTIALS = {
    "postgresql://u:p#ss@host/db": "postgresql://host/db",
    "postgresql://u:p?ss@host/db": "postgresql://host/db",
    "postgresql://u:p/ss@host/db": "postgresql://host/db",
    "postgresql://u:12/34@host/db": "postgresql://host/db",
    "postgresql://u:p:s s@host:5432/db": "postgresql://host:5432/db",
    "postgresql://u:p@s/s@host/db": "postgresql://host/db",
    "postgresql://u:p@[::1]:5432/db": "postgresql://[::1]:5432/db",
    "postgresql+psycopg2://me@corp:p/w@host/db?sslmode=require": "postgresql+psycopg2://host/db?sslmode=require",
    "mysql+pymysql://u:p%40@host/db?charset=utf8": "mysql+pymysql://host/db?charset=utf8",
    "postgresql:///db?host=/run&password=w#rd&ssl=1": "postgresql:///db?host=/run&ssl=1",
    "postgresql:///db?pass%77ord=word": "postgresql:///db",
    "mssql+pyodbc:///?odbc_connect=UID%3Du%3BPWD%3Dp": "mssql+pyodbc:///",
    "http://token@host:5000": "http://host:5000",
    "http://u:p@host:5000/x": "http://host:5000/x",
    "http://u:p#ss@host": "http://host",
    "http://u:12?34@host": "http://host",
    "http://u:p/ss@host": "http://host",
    "http://u:p@[::1": "http://[::1",
    "s3://bucket/x?next=http://u:p@host": "s3://bucket/x?next=http://host",
}
WITHOUT_CREDENTIALS = [
    "sqlite:////home/me@corp/mlflow.db?timeout=5", "postgresql://[::1]:5432/db?sslmode=require",
    "postgresql://host/d@b", "http://host:5000/users/@me", "http://[::1]:5000/@me", "http://host/?",
    "hdfs://namenode:8020/user/me@corp", "s3://bucket/run@1", "mlflow.db?password=1",
]  # fmt: skip


@pytest.mark.parametrize(("uri", "shown"), WITH_CREDENTIALS.items())
def test_credentials_are_removed_from_a_uri(uri: str, shown: str) -> None:
    assert without_credentials(uri) == shown
    assert without_credentials_in(uri) == shown


@pytest.mark.parametrize("uri", WITHOUT_CREDENTIALS)
def test_a_uri_without_credentials_stays_as_it_is(uri: str) -> None:
    assert without_credentials(uri) == uri
    assert without_credentials_in(f"({uri}): Access denied for 'u'@'h'") == f"({uri}): Access denied for 'u'@'h'"


@settings(max_examples=50, deadline=None)
@given(
    user=st.text(st.characters(exclude_characters=":/"), max_size=5),
    password=st.text(max_size=8),
    query=st.text(st.characters(exclude_characters="&"), max_size=5),
)
def test_a_password_of_any_characters_is_not_shown(user: str, password: str, query: str) -> None:
    uri = f"postgresql://{user}:secret{password}secret@host/db?password=secret{query}secret"
    assert without_credentials(uri) == "postgresql://host/db"
    if "@" not in user + password:
        assert make_url(uri).password == unquote(f"secret{password}secret")


@pytest.mark.parametrize("around", ["{}", "({})", "[{}]", "<{}>", "'{}'", '"{}"', "{{uri: {}, x: 1}}", "at {}.", "{};"])
@pytest.mark.parametrize(("uri", "shown"), WITH_CREDENTIALS.items())
def test_credentials_are_removed_from_a_uri_in_a_text(around: str, uri: str, shown: str) -> None:
    assert without_credentials_in(f"a {around.format(uri)} b") == f"a {around.format(shown)} b"


def test_credentials_are_removed_from_each_uri_of_a_text() -> None:
    said = "http://a:b#c@h is not http://h:5000/x, see (https://sqlalche.me/e/20)\nor write to me@home"
    assert without_credentials_in(said) == said.replace("a:b#c@", "")
    assert without_credentials_in('["http://h/?a=1","http://h2/?token=word"]') == '["http://h/"]'


def test_a_rejected_value_is_shown_without_credentials() -> None:
    with pytest.raises(ExperimentError) as error:
        Storage("s3://me:ses#ame@bucket/x")
    assert "ame" not in str(error.value)
    assert not has_password("sftp://me@host/x")
    assert Tracking(uri="postgresql://u:p#ss@host/db").model_dump()["uri"] == "postgresql://host/db"
