{% set kind = cookiecutter.data if cookiecutter.data in ("table", "text") else "images" -%}
{% include "predict/" ~ kind ~ ".py" -%}
