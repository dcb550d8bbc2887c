{% set images = {"resnet": "resnet", "transformer": "vit", "mlp": "mlp", "own": "own_images"} -%}
{% set other = {"text": {"transformer": "gpt", "own": "own_text"}, "table": {"mlp": "mlp", "own": "own_table"}, "table_classes": {"mlp": "mlp", "own": "own_table"}} -%}
{% include "model/" ~ other.get(cookiecutter.data, images).get(cookiecutter.model, "dcgan") ~ ".py" -%}
