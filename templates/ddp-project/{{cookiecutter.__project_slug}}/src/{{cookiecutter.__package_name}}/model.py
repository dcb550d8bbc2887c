{% set model = {"table": "mlp", "text": "gpt"}.get(cookiecutter.data, "resnet") -%}
{% include "model/" ~ model ~ ".py" -%}
