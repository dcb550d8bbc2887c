{% set answers = cookiecutter.task if cookiecutter.task != "supervised" else {"table": "table", "table_classes": "table_classes", "text": "text"}.get(cookiecutter.data, "images") -%}
{% include "predict/" ~ answers ~ ".py" -%}
