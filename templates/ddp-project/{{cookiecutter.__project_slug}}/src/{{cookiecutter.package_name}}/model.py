{% set images = {"resnet": "resnet", "transformer": "vit", "mlp": "mlp", "own": "own_images"} -%}
{% set file = {"transformer": "gpt", "own": "own_text"} if cookiecutter.data == "text" else images -%}
{% include "model/" ~ file[cookiecutter.model] ~ ".py" -%}
