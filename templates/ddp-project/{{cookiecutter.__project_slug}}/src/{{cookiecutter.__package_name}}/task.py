{% include "task/" ~ cookiecutter.task ~ ".py" ignore missing -%}
