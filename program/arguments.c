/* arguments.c - the command line. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char HELP[] =
    "Usage: qsf run MODEL.qsf [PROMPT]   an answer, by the file's chat form, or a continuation\n"
    "       qsf chat MODEL.qsf           a conversation: one message a line, /exit ends\n"
    "       qsf plan MODEL.qsf           where the memory would go\n"
    "       qsf inspect MODEL.qsf        what the file is\n"
    "       qsf verify MODEL.qsf         checks every byte of the file\n\n"
    "Options:\n"
    "  -p, --prompt TEXT         -f, --prompt-file FILE (\"-\": standard input)\n"
    "  --raw                     continue the prompt: no chat form\n"
    "  --system TEXT             how the model is to answer\n"
    "  --no-special              take text that reads like a special token as ordinary text\n"
    "  -n, --max-tokens N        at most so many; -1: until the model ends (default: -1 for\n"
    "                            answers by the chat form, else 256)\n"
    "  --temperature F  --top-p F  --top-k N  --min-p F  --repetition-penalty F\n"
    "                            (defaults: what the file recommends, else 0.7, 0.9, 40, 0, 1)\n"
    "  --seed N                  a number that gives the same text again\n"
    "  --stop TEXT               stop before this text; repeatable\n"
    "  --ram-budget SIZE         memory of the whole process: 300 (MB), 1.5GB, 50%; auto, the\n"
    "                            default: what the model needs, at most half of what is free;\n"
    "                            0: no limit\n"
    "  -t, --threads N           (default: one for each physical core)\n"
    "  -c, --max-seq-len N       longest sequence in tokens\n"
    "  --kv-type TYPE            f32, f16, 8bit, 4bit, 2bit, or keys and values apart: k8v4\n"
    "  --kv-rotation auto|on|off rotate keys and values before they are stored in few bits\n"
    "  --io METHOD --io-depth N  how weights are read: auto, buffered, direct, uring, mmap; and\n"
    "                            how many reads at a time\n"
    "  --quality F               below 1: skip the share 1 - F of the layers\n"
    "  --draft auto|off|FILE     guess tokens from the text, or with a smaller model\n"
    "  --draft-rows N            at most so many guesses in a pass\n"
    "  --pin-threads             keep each thread on a core of its own (Linux)\n"
    "  --exact                   full-precision arithmetic: slow, for reference\n"
    "  --plan                    print where the memory would go, and exit\n"
    "  --json                    print one JSON object\n"
    "  -q, --quiet               print no statistics\n"
    "  --version  -h, --help\n\n"
    "plan takes those from --ram-budget to --exact and --json, inspect and verify only --json.\n";

typedef enum kind { TEXT, FLAG, COUNT, REAL, WHOLE, SPECIAL } kind; /* WHOLE: a double, too */

typedef struct option {
    const char *name;
    char letter;
    kind kind;
    size_t offset; /* of the field of a request */
    double least;
    double most;
    const char *commands; /* first letters of those that take it */
} option;

#define AT(field) offsetof(request, field)
#define MOST_U32 4294967295.0
static const option OPTIONS[] = {
    {"prompt", 'p', TEXT, AT(prompt), 0, 0, "r"},
    {"prompt-file", 'f', TEXT, AT(prompt_file), 0, 0, "r"},
    {"system", 0, TEXT, AT(system), 0, 0, "rc"},
    {"raw", 0, FLAG, AT(is_raw), 0, 0, "r"},
    {"no-special", 0, FLAG, AT(no_special), 0, 0, "r"},
    {"json", 0, FLAG, AT(is_json), 0, 0, "rpiv"},
    {"quiet", 'q', FLAG, AT(is_quiet), 0, 0, "rcp"},
    {"plan", 0, FLAG, AT(is_plan), 0, 0, "rc"},
    {"max-tokens", 'n', SPECIAL, 0, -1, MOST_U32, "rc"},
    {"n-predict", 0, SPECIAL, 0, -1, MOST_U32, "rc"},
    {"seed", 0, SPECIAL, 0, 0, 0, "rc"},
    {"stop", 0, SPECIAL, 0, 0, 0, "rc"},
    {"ram-budget", 0, SPECIAL, 0, 0, 0, "rcp"},
    {"kv-type", 0, SPECIAL, 0, 0, 0, "rcp"},
    {"kv-rotation", 0, SPECIAL, 0, 0, 0, "rcp"},
    {"io", 0, SPECIAL, 0, 0, 0, "rcp"},
    {"draft", 0, SPECIAL, 0, 0, 0, "rcp"},
    {"temperature", 0, REAL, AT(temperature), 0, 100, "rc"},
    {"temp", 0, REAL, AT(temperature), 0, 100, "rc"},
    {"top-p", 0, REAL, AT(top_p), 1e-9, 1, "rc"},
    {"top-k", 0, WHOLE, AT(top_k), 0, MOST_U32, "rc"},
    {"min-p", 0, REAL, AT(min_p), 0, 1, "rc"},
    {"repetition-penalty", 0, REAL, AT(repetition_penalty), 0.01, 100, "rc"},
    {"repeat-penalty", 0, REAL, AT(repetition_penalty), 0.01, 100, "rc"},
    {"quality", 0, REAL, AT(opening.quality), 0, 1, "rcp"},
    {"threads", 't', COUNT, AT(opening.n_threads), 1, 256, "rcp"},
    {"max-seq-len", 'c', COUNT, AT(opening.ctx_tokens), 1, MOST_U32, "rcp"},
    {"ctx-size", 0, COUNT, AT(opening.ctx_tokens), 1, MOST_U32, "rcp"},
    {"io-depth", 0, COUNT, AT(opening.io_depth), 1, 32, "rcp"},
    {"draft-rows", 0, COUNT, AT(opening.draft_rows), 1, QSF_MAX_DRAFT_ROWS, "rcp"},
    {"pin-threads", 0, SPECIAL, 0, 0, 0, "rcp"},
    {"exact", 0, SPECIAL, 0, 0, 0, "rcp"},
};

_Noreturn static void refuse(const char *name, const char *value, const char *what)
{
    fprintf(stderr, "qsf: --%s %s: %s (qsf --help)\n", name, value, what);
    exit(2);
}

_Noreturn static void refuse_usage(const char *what, const char *word)
{
    fprintf(stderr, "qsf: %s%s (qsf --help)\n", what, word);
    exit(2);
}

static double parse_real(const option *o, const char *value)
{
    char *end;
    const double number = strtod(value, &end);
    char what[80];
    snprintf(what, sizeof what, "it is not a number from %g to %g", o->least, o->most);
    const bool is_decimal = value[strspn(value, "0123456789.eE+-")] == '\0';
    if (end == value || *end != '\0' || !is_decimal || !(number >= o->least && number <= o->most))
        refuse(o->name, value, what);
    return number;
}

/* A whole number that is given, which the engine takes from 1 on. */
static uint32_t parse_count(const option *o, const char *value)
{
    const double number = parse_real(o, value);
    if (number < 0 || number != (double)(uint32_t)number)
        refuse(o->name, value, "it is not a whole number");
    return (uint32_t)number;
}

static uint64_t parse_budget(const char *value)
{
    if (strcmp(value, "auto") == 0)
        return QSF_BUDGET_AUTO;
    static const struct {
        const char *unit;
        double mb;
    } UNITS[] = {{"", 1},      {"M", 1},      {"MB", 1},      {"MiB", 1},      {"G", 1024},
                 {"GB", 1024}, {"GiB", 1024}, {"T", 1048576}, {"TB", 1048576}, {"TiB", 1048576}};
    char *end;
    const double number = strtod(value, &end);
    if (end != value && number >= 0 && number < 1e12) {
        qsf_machine machine;
        if (strcmp(end, "%") == 0 && number >= 1 && number <= 100 &&
            qsf_machine_describe(&machine) == QSF_OK)
            return (uint64_t)((double)machine.memory_bytes * number / 100) >> 20 << 20;
        for (size_t i = 0; i < sizeof UNITS / sizeof UNITS[0]; i++) {
            const double mb = number * UNITS[i].mb;
            if (strcmp(end, UNITS[i].unit) == 0 && (number == 0 || (mb >= 1 && mb < MOST_U32)))
                return (uint64_t)mb << 20;
        }
    }
    refuse("ram-budget", value, "it is not a size: 300 (MB), 300MB, 1.5GB, 50%, auto, or 0");
}

static void parse_kv_type(const char *value, qsf_options *opening)
{
    static const char *const NAMES[] = {"2bit", "4bit", "8bit", "f16", "f32"};
    static const uint32_t BITS[] = {2, 4, 8, 16, 32};
    for (size_t i = 0; i < 5; i++)
        if (strcmp(value, NAMES[i]) == 0) {
            opening->kv_k_type = opening->kv_v_type = BITS[i];
            return;
        }
    for (size_t k = 0; k < 4; k++)
        for (size_t v = 0; v < 4; v++) {
            char name[16];
            snprintf(name, sizeof name, "k%uv%u", BITS[k], BITS[v]);
            if (strcmp(value, name) == 0) {
                opening->kv_k_type = BITS[k];
                opening->kv_v_type = BITS[v];
                return;
            }
        }
    refuse("kv-type", value, "it is not f32, f16, 8bit, 4bit, 2bit, or kXvY with 16, 8, 4, 2");
}

/* Index of the value among `words`, which end with NULL. */
static uint32_t parse_word(const char *name, const char *value, const char *const *words)
{
    for (uint32_t i = 0; words[i] != NULL; i++)
        if (strcmp(value, words[i]) == 0)
            return i;
    char what[100] = "it is not one of";
    for (size_t i = 0, n = strlen(what); words[i] != NULL && n < sizeof what; i++)
        n += (size_t)snprintf(what + n, sizeof what - n, " %s", words[i]);
    refuse(name, value, what);
}

/* Options whose values are read each in its own way. */
static void set_special(request *r, const option *o, const char *value)
{
    static const char *const IO[] = {"auto", "buffered", "direct", "uring", "mmap", NULL};
    static const char *const ROTATION[] = {"auto", "off", "on", NULL};
    qsf_options *const opening = &r->opening;
    if (o->most > 0) { /* max-tokens */
        r->has_max_tokens = true;
        r->max_tokens = strcmp(value, "-1") == 0 ? UINT32_MAX : parse_count(o, value);
    } else if (strcmp(o->name, "seed") == 0) {
        char *end;
        errno = 0;
        r->seed = strtoull(value, &end, 10);
        r->has_seed = true;
        if (*value < '0' || *value > '9' || *end != '\0' || errno != 0)
            refuse(o->name, value, "it is not a whole number from 0 to 18446744073709551615");
    } else if (strcmp(o->name, "stop") == 0) {
        if (*value == '\0' || r->n_stops == MAX_STOPS)
            refuse(o->name, value, "it is empty, or there are more than 16");
        r->stops[r->n_stops++] = value;
    } else if (strcmp(o->name, "ram-budget") == 0) {
        opening->budget_bytes = parse_budget(value);
    } else if (strcmp(o->name, "kv-type") == 0) {
        parse_kv_type(value, opening);
    } else if (strcmp(o->name, "kv-rotation") == 0) {
        opening->kv_rotation = parse_word(o->name, value, ROTATION);
    } else if (strcmp(o->name, "io") == 0) {
        opening->io_method = parse_word(o->name, value, IO);
    } else if (strcmp(value, "off") == 0) { /* draft */
        opening->draft_rows = 0;
    } else if (strcmp(value, "auto") != 0) {
        opening->draft_path = value;
    }
}

static bool is_switch(const option *o)
{
    return o->kind == FLAG || strcmp(o->name, "pin-threads") == 0 || strcmp(o->name, "exact") == 0;
}

static void set_option(request *r, const option *o, const char *value)
{
    char *const field = (char *)r + o->offset;
    if (o->kind == TEXT)
        memcpy(field, &value, sizeof value);
    else if (o->kind == FLAG)
        *(bool *)field = true;
    else if (strcmp(o->name, "pin-threads") == 0)
        r->opening.pin_threads = 1;
    else if (strcmp(o->name, "exact") == 0)
        r->opening.exact = 1;
    else if (o->kind == SPECIAL)
        set_special(r, o, value);
    else if (o->kind == REAL || o->kind == WHOLE) {
        const double number = o->kind == REAL ? parse_real(o, value) : parse_count(o, value);
        memcpy(field, &number, sizeof number);
    } else {
        const uint32_t number = parse_count(o, value);
        memcpy(field, &number, sizeof number);
    }
}

static const option *find_option(const char *word, const char **value)
{
    for (size_t i = 0; i < sizeof OPTIONS / sizeof OPTIONS[0]; i++) {
        const option *const o = &OPTIONS[i];
        const size_t n = strlen(o->name);
        *value = NULL;
        if (word[1] != '-' && word[1] == o->letter && word[2] == '\0')
            return o;
        if (word[1] == '-' && strncmp(word + 2, o->name, n) == 0 &&
            (word[2 + n] == '\0' || word[2 + n] == '=')) {
            *value = word[2 + n] == '=' ? word + 3 + n : NULL;
            return o;
        }
    }
    refuse_usage("there is no option ", word);
}

static void parse_words(int argc, char **argv, request *r)
{
    for (int i = 2; i < argc; i++) {
        const char *value;
        if (argv[i][0] != '-' || argv[i][1] == '\0') {
            if (r->model == NULL)
                r->model = argv[i];
            else if (r->prompt == NULL && strcmp(r->command, "run") == 0)
                r->prompt = argv[i];
            else
                refuse_usage("not understood: ", argv[i]);
            continue;
        }
        const option *const o = find_option(argv[i], &value);
        if (strchr(o->commands, r->command[0]) == NULL) {
            char what[40];
            snprintf(what, sizeof what, "%s does not take ", r->command);
            refuse_usage(what, argv[i]);
        }
        if (is_switch(o) ? value != NULL : value == NULL && i + 1 == argc)
            refuse_usage(is_switch(o) ? "no value belongs to " : "a value is missing: ", argv[i]);
        if (!is_switch(o) && value == NULL)
            value = argv[++i];
        set_option(r, o, value);
    }
}

void parse_arguments(int argc, char **argv, request *out)
{
    static const char *const COMMANDS[] = {"run", "chat", "plan", "inspect", "verify", NULL};
    *out = (request){.max_tokens = 256,
                     .temperature = -1,
                     .top_p = -1,
                     .top_k = -1,
                     .min_p = -1,
                     .repetition_penalty = -1};
    qsf_options_default(&out->opening);
    out->opening.draft_rows = 15;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(HELP, stdout);
            exit(0);
        }
        if (strcmp(argv[i], "--version") == 0) {
            printf("qsf %s\n", qsf_version());
            exit(0);
        }
    }
    if (argc < 2) {
        fputs(HELP, stderr);
        exit(2);
    }
    for (size_t i = 0; COMMANDS[i] != NULL; i++)
        if (strcmp(argv[1], COMMANDS[i]) == 0)
            out->command = COMMANDS[i];
    if (out->command == NULL)
        refuse_usage("there is no command ", argv[1]);
    parse_words(argc, argv, out);
    if (out->model == NULL)
        refuse_usage("MODEL is missing: a .qsf file", "");
    if (out->prompt != NULL && out->prompt_file != NULL)
        refuse_usage("--prompt and --prompt-file exclude each other", "");
    if (out->is_raw && out->system != NULL)
        refuse_usage("--raw has no turns: leave --system out", "");
}
