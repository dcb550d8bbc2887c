{% set kind = cookiecutter.data if cookiecutter.data in ("table", "text") else "images" -%}
{% include "predict/" ~ kind ~ ".py" %}

def main() -> None:
    """Print the predictions of a run's model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("inputs", nargs="+", help="{{ {"table": "CSV files with the columns of the training's", "text": "beginnings of texts"}.get(kind, "image files") }}")
    parser.add_argument("--run", default="latest", help="part of a run's id, or its folder; default: the latest run")
    arguments = parser.parse_args()
    try:
        trained = Trained.load(arguments.run)
        print(f"predictions of {trained.folder}:", file=sys.stderr)
        for one in arguments.inputs:
            print(describe(trained, one))
    except (OSError, ValueError, PipelineError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
