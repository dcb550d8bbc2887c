{% set answers = {"table": "table", "text": "text"}.get(cookiecutter.data, "images") -%}
{% include "predict/" ~ answers ~ ".py" -%}
