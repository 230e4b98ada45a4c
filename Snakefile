# Anchorage: a corpus through a language model, its activations on disk, proved to equal the model.
#
#   snakemake --cores 4            the whole default run; the same command resumes after anything
#   snakemake --cores 4 cache      up to a target: corpus, cache, verify, anchor, memory, extrapolation, probes, loading
#   --configfile config/x.yaml     another run; keys are explained in config/README.md
import sys

from snakemake.utils import min_version

min_version("9.0")
try:
    import anchorage
except ImportError:
    sys.exit(
        "The package anchorage is not installed here. Run `make run`, or `pip install -r requirements.lock -e .`"
    )

# A run's own configuration file is whole: merged into the default one it would inherit the default's tiers.
if not workflow.config_settings.configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/resources.smk"
include: "workflow/rules/corpus.smk"
include: "workflow/rules/capture.smk"
include: "workflow/rules/trust.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/measurements.smk"
include: "workflow/rules/loading.smk"
include: "workflow/rules/durability.smk"
include: "workflow/rules/report.smk"


localrules:
    all,
    corpus,
    cache,
    verify,
    anchor,
    memory,
    extrapolation,
    probes,
    loading,
    plan,
    costs,
    padding,
    measurements,
    durability,
    everything,


rule all:
    default_target: True
    input:
        CORPUS_RESULTS,
        CACHE_RESULTS,
        VERIFY_RESULTS,
        ANCHOR_RESULTS,
        MEMORY_RESULTS,
        EXTRAPOLATION_RESULTS,
        PROBE_RESULTS,
        OUTLIER_RESULTS,
        LOADING_RESULTS,
        OVERVIEW_RESULTS,


rule corpus:
    input:
        CORPUS_RESULTS,


rule cache:
    input:
        CORPUS_RESULTS,
        CACHE_RESULTS,


rule verify:
    input:
        VERIFY_RESULTS,


rule anchor:
    input:
        CORPUS_RESULTS,
        CACHE_RESULTS,
        ANCHOR_RESULTS,


rule memory:
    input:
        CORPUS_RESULTS,
        CACHE_RESULTS,
        MEMORY_RESULTS,


rule extrapolation:
    input:
        CORPUS_RESULTS,
        CACHE_RESULTS,
        MEMORY_RESULTS,
        EXTRAPOLATION_RESULTS,


rule probes:
    input:
        CORPUS_RESULTS,
        CACHE_RESULTS,
        VERIFY_RESULTS,
        PROBE_RESULTS,
        OUTLIER_RESULTS,


rule loading:
    input:
        CORPUS_RESULTS,
        CACHE_RESULTS,
        VERIFY_RESULTS,
        LOADING_RESULTS,


# Not part of `all`: a forecast, made before the run.
rule plan:
    input:
        CORPUS_RESULTS,
        PLAN_RESULTS,


# These are not part of `all`: they measure the machine and the libraries, and take minutes.
rule costs:
    input:
        COSTS_RESULTS,


rule padding:
    input:
        PADDING_RESULTS,


rule measurements:
    input:
        COSTS_RESULTS,
        PADDING_RESULTS,


rule durability:
    input:
        DURABILITY_RESULTS,


rule everything:
    input:
        rules.all.input,
        rules.measurements.input,
        DURABILITY_RESULTS,


onstart:
    try:
        # Kept open by the name: the lock ends with this process, whichever way that ends.
        RUN_LOCK = hold_run(settings)
    except AnchorageError as error:
        raise WorkflowError(str(error)) from None


onsuccess:
    # Once more, where it is seen: the job that found it ended long ago.
    if warning := leak_warning(settings):
        logger.warning(warning)
