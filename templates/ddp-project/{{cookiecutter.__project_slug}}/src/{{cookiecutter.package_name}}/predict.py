{% set answers = {"table": "table", "table_classes": "table_classes", "text": "text"}.get(cookiecutter.data, "images") -%}
{% include "predict/" ~ answers ~ ".py" -%}
