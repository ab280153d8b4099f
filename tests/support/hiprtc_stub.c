/* A stand-in for libhiprtc with its ABI (hiprtc.h): it "compiles" to an ELF that names the options, warns of a text that
 * says WARN and refuses one that says ERROR. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char text[64], log[64], code[4096];
} Program;

static int alive;
int stub_alive(void) { return alive; }

int hiprtcVersion(int *major, int *minor) {
    *major = 7, *minor = 1;
    return 0;
}
int hiprtcCreateProgram(Program **out, const char *text, const char *name, int count, const char **headers,
                        const char **names) {
    if (!name || count || headers || names) return 3; /* INVALID_INPUT */
    *out = calloc(1, sizeof **out);
    snprintf((*out)->text, sizeof (*out)->text, "%s", text);
    alive++;
    return 0;
}
int hiprtcCompileProgram(Program *p, int count, const char **options) {
    strcpy(p->code, "\177ELF");
    for (int i = 0; i < count; i++) strncat(strcat(p->code, " "), options[i], 64);
    if (strstr(p->text, "WARN")) strcpy(p->log, "warning: of something\n");
    if (strstr(p->text, "ERROR")) strcpy(p->log, "error: of something\n");
    return strstr(p->text, "ERROR") ? 6 : 0; /* COMPILATION */
}
int hiprtcGetProgramLogSize(Program *p, size_t *size) { return *size = strlen(p->log) + 1, 0; }
int hiprtcGetProgramLog(Program *p, char *to) { return strcpy(to, p->log), 0; }
int hiprtcGetCodeSize(Program *p, size_t *size) { return *size = strlen(p->code), 0; }
int hiprtcGetCode(Program *p, char *to) { return memcpy(to, p->code, strlen(p->code)), 0; }
int hiprtcDestroyProgram(Program **p) {
    free(*p);
    *p = NULL;
    alive--;
    return 0;
}
