/* What the programs here check with. Whoever includes it has defined FINE, the code of success, and WORDS(), the text of
 * the last error. A check that does not hold ends the program with a line that names it. */

#define WORKS(call)                                                                                \
    do {                                                                                           \
        int rc = (call);                                                                           \
        if (rc != FINE) {                                                                          \
            fprintf(stderr, "%d: %s: returned %d: %s\n", __LINE__, #call, rc, WORDS());            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define HOLDS(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%d: not so: %s; %s\n", __LINE__, #condition, WORDS());                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
